"""The state that everybody agrees on: parameters, outer steps, and the chain of state roots.

It changes in one way only: a window is applied, in order, with the payloads of its decided roster or with none.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

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
    """

    def __init__(self, params: Mapping[str, Tensor], mark: StateMark, layout: Layout, training: Training) -> None:
        self.params = dict(params)
        self.window = mark.window
        self.outer_steps = mark.outer_steps
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
            root = _root_after(
                self.window, self.outer_steps, self._previous_root, null=self._null, digest=self._digest.result()
            )
            self._mark = StateMark(self.window, self.outer_steps, root, self._previous_root, self._null)
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
        self.window, self._null, self._mark = window, not payloads, None


def check_mark(params: Mapping[str, Tensor], mark: StateMark, what: str) -> None:
    """Check that parameters are the ones that a mark speaks of.

    Raises:
        PermanentError: `root_differs`.
    """
    digest = parameters_digest(params)
    root = _root_after(mark.window, mark.outer_steps, mark.previous_root, null=mark.null, digest=digest)
    if root != mark.root:
        raise PermanentError(
            Reason.ROOT_DIFFERS,
            f"{what}: its parameters give the root {root[:12]}, not {mark.root[:12]}; it is damaged or forged",
        )


def _root_after(window: int, outer_steps: int, previous: str, *, null: bool, digest: str) -> str:
    if null:
        return null_root(previous, window, digest)
    return next_root(previous, window, outer_steps, digest)
