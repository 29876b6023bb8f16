"""`hparams.json` as one frozen, typed tree.

Every number that networks may choose stands in `hparams.json` and nowhere else, and each field is documented here, at
the field; the constants of the rules are in docs/protocol.md. An unknown key, a missing key or a value out of range is
an error that names it. Secrets and endpoints are not hyper-parameters: they come from the environment and from blocks.

A preset may name another one in `extends`; its sections are merged over it, key by key.
"""

from templar.hparams.groups import (
    MAX_PEERS,
    PRODUCTION_TRAINER,
    RENDEZVOUS,
    AdamW,
    Data,
    Gradient,
    Model,
    Peers,
    Penalty,
    Schedule,
    Scoring,
    Slashing,
    Storage,
    TrainerSettings,
    Training,
    Weights,
    Windows,
)
from templar.hparams.tree import DEFAULT_PRESET, HPARAMS_FILE, HParams, load_hparams, preset_names

__all__ = [
    "DEFAULT_PRESET",
    "HPARAMS_FILE",
    "MAX_PEERS",
    "PRODUCTION_TRAINER",
    "RENDEZVOUS",
    "AdamW",
    "Data",
    "Gradient",
    "HParams",
    "Model",
    "Peers",
    "Penalty",
    "Schedule",
    "Scoring",
    "Slashing",
    "Storage",
    "TrainerSettings",
    "Training",
    "Weights",
    "Windows",
    "load_hparams",
    "preset_names",
]
