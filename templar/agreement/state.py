"""The agreed state: parameters, the count of outer steps and the chain of state roots (docs/protocol.md 10).

The state changes in one way only: windows are applied in order, each with the payloads of its decided roster or with
none. Two nodes share a state root if and only if their parameters and their histories are the same.

A root can be recomputed with nothing but SHA-256 and JSON (`json` is canonical JSON: keys sorted, no spaces, ASCII):

    leaf(tensor)  = SHA-256( json {"domain": "templar/tensor/1", "dtype": "float32", "name": ..., "shape": [...]}
                             + newline + the elements in row-major order, little-endian )
    parameters    = SHA-256( json {"domain": "templar/parameters/1", "leaves": [hex leaf, ... in order of the names]} )
    genesis root  = SHA-256( json {"domain": "templar/root/genesis/1", "netuid": n, "parameters": hex} )
    next root     = SHA-256( json {"domain": "templar/root/next/1", "outer_steps": s, "parameters": hex,
                                   "previous": hex root before, "window": w} )
    null root     = SHA-256( json {"domain": "templar/root/null/1", "parameters": hex,
                                   "previous": hex root before, "window": w} )

`outer_steps` includes the step of `w`; a null window has no step. Hashes are 64 lower-case hex digits. In a network
that trains on shards, next and null roots have one more field, "epochs": the list of [first window, position] of
`templar.data.assignment.Epochs` after `w`. Once the plan has entries, they have "plan": the entries' digests.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from templar.agreement.settings_plan import SettingsPlan
from templar.canonical import canonical_json, sha256_hex
from templar.data.assignment import Epochs, advanced, first_epochs
from templar.errors import PermanentError, Reason
from templar.exchange.objects import PlanEntry
from templar.gradient.aggregate import aggregate, outer_step
from templar.gradient.codec.wire import Payload
from templar.gradient.layout import Layout
from templar.hparams import HParams
from templar.shared_results import Same, shared
from templar.training.schedule import loudest_coefficient, outer_learning_rate, outer_weight_decay


@dataclass(frozen=True)
class StateMark:
    """Which state a checkpoint or snapshot holds."""

    window: int  # the last one that was applied or found null
    outer_steps: int  # since genesis
    root: str  # after `window`
    previous_root: str  # before `window`; with the parameters it proves `root`
    null: bool  # whether `window` was null
    epochs: Epochs = ()  # the shards of its window and the two after it; none in a network that trains on pages
    plan: tuple[PlanEntry, ...] = ()  # the entries that were adopted up to `window`


# A root is needed only when it is published or compared, so parameters are hashed in the background.
_hasher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state-root")


class AgreedState:
    """Parameters and the window that they belong to.

    It owns and changes `params`, float32 by name. `check_mark` checks the mark. `genesis` are the settings that the
    network started with.
    """

    def __init__(self, params: Mapping[str, Tensor], mark: StateMark, layout: Layout, genesis: HParams) -> None:
        self.params = dict(params)
        self.window = mark.window
        self.outer_steps = mark.outer_steps
        self.epochs, self.plan = mark.epochs, SettingsPlan(genesis, mark.plan)
        self._outer_steps_per_shard = genesis.data.shard_steps
        if self._outer_steps_per_shard is not None and not mark.epochs:  # genesis: every later root covers its epochs
            self.epochs = first_epochs(mark.window + 1)
        self._layout = layout
        self._mark: StateMark | None = mark
        self.previous_root = mark.previous_root  # before `window`
        self._null = mark.null
        self._digest: Future[str] = _hasher.submit(parameters_digest, self.params)

    @property
    def root(self) -> str:
        """State root after `window`; waits while the parameters are being hashed."""
        return self.mark.root

    @property
    def mark(self) -> StateMark:
        """Which state this is; waits while the parameters are being hashed."""
        if self._mark is None:
            agreed = self.epochs, self.plan.entries
            unrooted = StateMark(self.window, self.outer_steps, "", self.previous_root, self._null, *agreed)
            self._mark = replace(unrooted, root=state_root(unrooted, self._digest.result()))
        return self._mark

    @property
    def limit(self) -> float | None:
        """The bound of the next window's coefficients, as `loudest_coefficient` gives it."""
        settings = self.plan.at(self.window + 1)
        return loudest_coefficient(settings.training, settings.gradient.momentum_decay, self.outer_steps)

    def apply(self, window: int, payloads: Sequence[Payload], plan: SettingsPlan | None = None) -> None:
        """Apply the next window; without payloads it is a null window, which changes no parameter (docs/protocol.md 9).

        `plan` is the plan after it, None if it stays.

        PermanentError: `plan_unknown`, and nothing was changed. ValueError: `window` is not the next one: a window is
        never skipped and never applied twice.
        """
        if window != self.window + 1:
            raise ValueError(f"the state is that of window {self.window}: window {window} cannot be applied to it")
        self.plan.at(window)
        self.previous_root = self.root  # the parameters must be hashed before they change
        if payloads:
            rates = self._step(self.params, payloads)
            self.outer_steps += 1
            step = (self.previous_root, *rates, self._layout.digest, *map(Same, payloads))
            self._digest = _digest_after(step, self.params)
        self.plan = self.plan if plan is None else plan
        if self._outer_steps_per_shard is not None:
            self.epochs = advanced(self.epochs, window, self.outer_steps, self._outer_steps_per_shard)
        self.window, self._null, self._mark = window, not payloads, None

    def foreseen(self, payloads: Sequence[Payload]) -> dict[str, Tensor]:
        """The parameters after the next window, if these payloads, one at least, are applied; nothing is changed."""
        params = {name: param.clone() for name, param in self.params.items()}
        self._step(params, payloads)
        return params

    def _step(self, params: Mapping[str, Tensor], payloads: Sequence[Payload]) -> tuple[float, float]:
        """Take the outer step of the next window, in place; its learning rate and weight decay."""
        training = self.plan.at(self.window + 1).training
        rate, decay = outer_learning_rate(training, self.outer_steps), outer_weight_decay(training)
        outer_step(params, _update(payloads, self._layout, self.limit), learning_rate=rate, weight_decay=decay)
        return rate, decay


@shared(lambda payloads, layout, limit: (layout.digest, limit, *map(Same, payloads)), most=4)
def _update(payloads: Sequence[Payload], layout: Layout, limit: float | None) -> Mapping[str, Tensor]:
    return aggregate(payloads, layout, limit)


@shared(lambda step, params: step, most=64)
def _digest_after(step: Hashable, params: Mapping[str, Tensor]) -> Future[str]:
    """The digest of parameters that are the result of a step: of a root, the rates and the payloads."""
    del step
    return _hasher.submit(parameters_digest, params)


def check_mark(params: Mapping[str, Tensor], mark: StateMark, what: str) -> None:
    """Check that parameters have the root of a mark; PermanentError `root_differs` if not."""
    root = state_root(mark, parameters_digest(params))
    if root != mark.root:
        raise PermanentError(
            Reason.ROOT_DIFFERS,
            f"{what}: its parameters give the root {root[:12]}, not {mark.root[:12]}; it is damaged or forged",
        )


def parameters_digest(params: Mapping[str, Tensor]) -> str:
    """The hash of all parameters; tensors that are not on the CPU are copied to it one at a time."""
    return _hash("templar/parameters/1", leaves=[_leaf(name, params[name]) for name in sorted(params)])


def genesis_root(netuid: int, digest: str) -> str:
    """The root before the first window, of the parameters with this digest."""
    return _hash("templar/root/genesis/1", netuid=netuid, parameters=digest)


def state_root(mark: StateMark, digest: str) -> str:
    """The root after a mark's window, of parameters with this digest; `mark.root` is not read."""
    fields: dict[str, Any] = {"parameters": digest, "previous": mark.previous_root, "window": mark.window}
    if mark.epochs:
        fields["epochs"] = [[epoch.first_window, epoch.position] for epoch in mark.epochs]
    if mark.plan:
        fields["plan"] = [entry.digest for entry in mark.plan]
    if mark.null:
        return _hash("templar/root/null/1", **fields)
    return _hash("templar/root/next/1", outer_steps=mark.outer_steps, **fields)


def _leaf(name: str, tensor: Tensor) -> str:
    header = {
        "domain": "templar/tensor/1",
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "name": name,
        "shape": list(tensor.shape),
    }
    digest = hashlib.sha256(canonical_json(header) + b"\n")
    elements = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # little-endian, as all our machines
    digest.update(elements.numpy().data)
    return digest.hexdigest()


def _hash(domain: str, **fields: Any) -> str:
    return sha256_hex(canonical_json({"domain": domain, **fields}))
