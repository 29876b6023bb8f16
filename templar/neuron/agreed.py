"""The state that everybody agrees on: parameters, outer steps, and the chain of state roots.

It changes in one way only: a window is applied, in order, with the payloads of its decided roster or with none.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from torch import Tensor

from templar.data.epochs import advanced, first_epochs
from templar.errors import PermanentError, Reason
from templar.exchange.checkpoint import StateMark
from templar.gradient.aggregate import aggregate
from templar.gradient.layout import Layout
from templar.gradient.outer import outer_step
from templar.gradient.payload import Payload
from templar.hparams import Training
from templar.model.root import next_root, null_root, parameters_digest
from templar.model.schedule import outer_learning_rate, outer_weight_decay

# Parameters are hashed beside whatever comes next: nobody waits for a root until it is published or compared.
_hasher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state-root")


class AgreedState:
    """Parameters and the window that they belong to.

    Args:
        params: Float32 parameters by name; owned by this object from now on.
        mark: Which state they are; not checked here, see `check_mark`.
        layout: Tensors and chunks.
        training: Recipe and step sizes.
        outer_steps_per_shard: Outer steps between two shards; None in a network that trains on pages.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        mark: StateMark,
        layout: Layout,
        training: Training,
        outer_steps_per_shard: int | None = None,
    ) -> None:
        self.params = dict(params)
        self.window = mark.window
        self.outer_steps = mark.outer_steps
        self.epochs = mark.epochs
        if outer_steps_per_shard is not None and not mark.epochs:  # genesis: every later root covers its epochs
            self.epochs = first_epochs(mark.window + 1)
        self._outer_steps_per_shard = outer_steps_per_shard
        self._layout = layout
        self._training = training
        self._mark: StateMark | None = mark
        self._previous_root = mark.previous_root
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
            unrooted = StateMark(self.window, self.outer_steps, "", self._previous_root, self._null, self.epochs)
            self._mark = replace(unrooted, root=_root_of(unrooted, self._digest.result()))
        return self._mark

    def apply(self, window: int, payloads: Sequence[Payload]) -> None:
        """Apply the next window; without payloads it is a null window, which changes no parameter (PROTOCOL 19).

        Raises:
            ValueError: `window` is not the next one: a window is never skipped and never applied twice.
        """
        if window != self.window + 1:
            raise ValueError(f"the state is that of window {self.window}: window {window} cannot be applied to it")
        self._previous_root = self.root  # the parameters must be hashed before they change
        if payloads:
            outer_step(
                self.params,
                aggregate(payloads, self._layout),
                learning_rate=outer_learning_rate(self._training, self.outer_steps),
                weight_decay=outer_weight_decay(self._training),
            )
            self.outer_steps += 1
            self._digest = _hasher.submit(parameters_digest, self.params)
        if self._outer_steps_per_shard is not None:
            self.epochs = advanced(self.epochs, window, self.outer_steps, self._outer_steps_per_shard)
        self.window, self._null, self._mark = window, not payloads, None


def check_mark(params: Mapping[str, Tensor], mark: StateMark, what: str) -> None:
    """Check that parameters are the ones that a mark speaks of.

    Raises:
        PermanentError: `root_differs`.
    """
    root = _root_of(mark, parameters_digest(params))
    if root != mark.root:
        raise PermanentError(
            Reason.ROOT_DIFFERS,
            f"{what}: its parameters give the root {root[:12]}, not {mark.root[:12]}; it is damaged or forged",
        )


def _root_of(mark: StateMark, digest: str) -> str:
    """The root of a state with these parameters, whatever root its mark has."""
    epochs = [(epoch.first_window, epoch.position) for epoch in mark.epochs]
    if mark.null:
        return null_root(mark.previous_root, mark.window, digest, epochs)
    return next_root(mark.previous_root, mark.window, mark.outer_steps, digest, epochs)
