"""Every kind of miner that a simulation, a gauntlet or a local network can run, by name."""

from collections.abc import Mapping

from templar.adversary import hostile
from templar.adversary.cheats import (
    GamingMiner,
    HalfMiner,
    NearZeroMiner,
    OneBatchMiner,
    OverfittingMiner,
    ShuffledMiner,
    SignFlipMiner,
    StaleMiner,
    WrongDataMiner,
)
from templar.adversary.copiers import (
    BlendingMiner,
    PlagiarisingMiner,
    RecyclingMiner,
    SybilMiner,
    WithinNormMiner,
)
from templar.adversary.hostile import mutating, spoiling
from templar.adversary.impostors import (
    BucketCopyingMiner,
    CommitCopyingMiner,
    CopyingMiner,
    ImpersonatingMiner,
    LateCommittingCopyingMiner,
    RepeatingMiner,
    ReplayingMiner,
)
from templar.adversary.miners import (
    ColludingMiner,
    GarbageMiner,
    HugeMiner,
    IdleMiner,
    IdleValidator,
    LazyMiner,
    ZeroMiner,
)
from templar.adversary.mutations import MUTATIONS
from templar.adversary.timing import (
    EarlyCommittingMiner,
    FastClockMiner,
    HastyMiner,
    LateCommittingMiner,
    LateMiner,
    LateSwappingMiner,
    SilentMiner,
    SlowClockMiner,
    SwappingMiner,
    WithdrawingMiner,
)
from templar.neuron.miner import Miner
from templar.neuron.node import Node

SPOILT_MANIFESTS = {
    "manifest_deep_json": hostile.deep_json,
    "manifest_huge_string": hostile.huge_string,
    "manifest_control_characters": hostile.control_characters,
    "manifest_raw_control_characters": hostile.raw_control_characters,
    "manifest_not_a_number": hostile.not_a_number,
    "manifest_spaced": hostile.spaced,
    "manifest_forged_signature": hostile.forged_signature,
    "manifest_empty": hostile.no_manifest,
}

ACTORS: Mapping[str, type[Miner]] = {
    "honest": Miner,
    "lazy": LazyMiner,
    "silent": SilentMiner,
    "late": LateMiner,
    "garbage": GarbageMiner,
    "huge": HugeMiner,
    "zero": ZeroMiner,
    "colluding": ColludingMiner,
    "hasty": HastyMiner,
    "late_commit": LateCommittingMiner,
    "early_commit": EarlyCommittingMiner,
    "fast_clock": FastClockMiner,
    "slow_clock": SlowClockMiner,
    "swapping": SwappingMiner,
    "late_swapping": LateSwappingMiner,
    "withdrawing": WithdrawingMiner,
    "copying": CopyingMiner,
    "copying_late_commit": LateCommittingCopyingMiner,
    "copying_commit": CommitCopyingMiner,
    "copying_bucket": BucketCopyingMiner,
    "impersonating": ImpersonatingMiner,
    "replaying": ReplayingMiner,
    "repeating": RepeatingMiner,
    "half": HalfMiner,
    "wrong_data": WrongDataMiner,
    "one_batch": OneBatchMiner,
    "overfitting": OverfittingMiner,
    "sign_flip": SignFlipMiner,
    "shuffled": ShuffledMiner,
    "stale": StaleMiner,
    "near_zero": NearZeroMiner,
    "gaming": GamingMiner,
    "recycling": RecyclingMiner,
    "plagiarising": PlagiarisingMiner,
    "blending": BlendingMiner,
    "within_norm": WithinNormMiner,
    "sybil": SybilMiner,
    "pickle": hostile.PickleMiner,
    "smuggled_pickle": hostile.SmuggledPickleMiner,
    "zip_bomb": hostile.ZipBombMiner,
    "junk_keys": hostile.JunkKeysMiner,
    "wrong_hash": hostile.WrongHashMiner,
    "wrong_size": hostile.WrongSizeMiner,
    "five_gigabytes": hostile.FiveGigabyteMiner,
    "foreign": hostile.ForeignMiner,
    "old_client": hostile.OldClientMiner,
    "other_data": hostile.OtherDataMiner,
    **{name: mutating(name, mutation) for name, (mutation, _) in MUTATIONS.items()},
    **{name: spoiling(name, spoil) for name, spoil in SPOILT_MANIFESTS.items()},
}
"""Every kind of miner that a simulation or a local network can run."""


def idle(kind: type[Miner]) -> type[Miner]:
    """The same miner without training: what it does besides is unchanged, and its update is noise."""
    if issubclass(IdleMiner, kind):
        return IdleMiner
    return type(f"Idle{kind.__name__}", (kind, IdleMiner), {"__doc__": kind.__doc__, "__module__": kind.__module__})


IDLE: Mapping[str, type[Node]] = {"validator": IdleValidator, **{name: idle(kind) for name, kind in ACTORS.items()}}
"""What takes the place of the roles that train and measure when only the protocol is to run."""
