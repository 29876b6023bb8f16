"""A miner's progress within a window, on its disk: a miner that was killed goes on training from there.

`spool/progress-{window}.safetensors` has what `templar.training.train.StepState` has: tensors, the moments of the inner
optimizer where the recipe has one, and as metadata the losses, a checksum, and the key: what the training started from.
A file with another key, or one that is not whole, is not used. Any reader of safetensors reads it.
"""

import json
import logging
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from templar.canonical import canonical_json
from templar.errors import PermanentError, Reason
from templar.neuron.lock import write_file
from templar.neuron.snapshot import EXP_AVG, EXP_AVG_SQ
from templar.tensorfile import StoredTensors, TensorWriter
from templar.training.train import OptimizerState, StepState

log = logging.getLogger(__name__)

_STATE = "state/"
_BYTES_PER_SECOND = 1e9
"""The assumed speed of a write, until one has shown it."""
_LOSSES, _NUM_STEPS, _CHECKSUM = "losses", "num_steps", "crc32"


class ProgressFile:
    """Keeps the progress of one training in one file; the trainer's `TrainProgress`.

    Args:
        path: The file; it need not exist.
        key: What the training started from, by name. A file that has another value of one of them is not used.
        shapes: The parameters' shape by name.
        has_moments: Whether the recipe has an inner optimizer.
        seconds: Least seconds between two writes; the first is as long after this object was made.
        durable: Whether the disk is waited for.
        seconds_left: Seconds until training must stop; a write that is expected to take longer is left out.
        now: Seconds of a clock that never goes back.
    """

    def __init__(
        self,
        path: Path,
        key: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        has_moments: bool,
        seconds: float,
        durable: bool,
        seconds_left: Callable[[], float] = lambda: math.inf,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._key, self._seconds, self._durable, self._now = path, dict(key), seconds, durable, now
        prefixes = (_STATE, EXP_AVG, EXP_AVG_SQ) if has_moments else (_STATE,)
        self._shapes = {prefix + name: tuple(shapes[name]) for prefix in prefixes for name in sorted(shapes)}
        self._has_moments, self._seconds_left = has_moments, seconds_left
        self._last = now()
        self._took = 4 * sum(math.prod(shape) for shape in self._shapes.values()) / _BYTES_PER_SECOND

    def save(self, state: StepState) -> None:
        """Write the state if a write is due; a disk that fails is a warning, for the training goes on."""
        begun = self._now()
        if begun - self._last < self._seconds or self._seconds_left() < self._took:
            return
        metadata = self._key | {
            _LOSSES: json.dumps(state.losses),
            _NUM_STEPS: str(0 if state.optimizer is None else state.optimizer.num_steps),
        }
        metadata[_CHECKSUM] = _checksum(metadata, (tensor for _, tensor in self._tensors(state)))

        def write(path: Path) -> None:
            with TensorWriter(path, self._shapes, metadata) as file:
                for name, tensor in self._tensors(state):
                    file.write(name, tensor)

        try:
            write_file(self._path, write, durable=self._durable)
        except OSError as error:
            log.warning("%s: the progress of the training was not written: %s", self._path, error)
        self._last = self._now()
        self._took = self._last - begun

    def restore(self) -> StepState | None:
        """The state in the file; None, and a line in the log that says why, if it is not one to go on from."""
        if not self._path.exists():
            return None
        try:
            state = self._read()
        except PermanentError as error:
            log.warning("the training starts from the beginning: %s", error)
            return None
        log.info("%s: the training goes on after step %d", self._path, len(state.losses))
        return state

    def _read(self) -> StepState:
        """Read and check everything; the state's tensors are read from the disk once more when they are needed.

        Raises:
            PermanentError: `bad_state_file`, with what is wrong.
        """
        # 1. Of the same training.
        stored = StoredTensors(self._path)
        metadata = dict(stored.metadata)
        for name, value in self._key.items():
            if metadata.get(name) != value:
                raise self._refused(f"its {name} is {metadata.get(name)!r}, and {value!r} is this training's")
        if stored.shapes != self._shapes:
            raise self._refused("its tensors are not those of this model and recipe")
        # 2. As it was written.
        found = metadata.pop(_CHECKSUM, None)
        if found != _checksum(metadata, (stored[name] for name in self._shapes)):
            raise self._refused("it is not what was written: its checksum differs")
        try:
            losses = tuple(float(loss) for loss in json.loads(metadata[_LOSSES]))
            num_steps = int(metadata[_NUM_STEPS])
        except (KeyError, ValueError, TypeError) as error:
            raise self._refused(f"its losses or steps cannot be read: {error!r}") from None
        if not losses or not all(map(math.isfinite, losses)):
            raise self._refused("it has no finite losses")
        # 3. Tensors by parameter name.
        optimizer = None
        if self._has_moments:
            moments = (StoredTensors(self._path, prefix) for prefix in (EXP_AVG, EXP_AVG_SQ))
            optimizer = OptimizerState(num_steps, *moments)
        return StepState(losses, StoredTensors(self._path, _STATE), optimizer)

    def _refused(self, why: str) -> PermanentError:
        return PermanentError(Reason.BAD_STATE_FILE, f"{self._path}: {why}")

    def _tensors(self, state: StepState) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, in the file's order."""
        parts = [(_STATE, state.tensors)]
        if state.optimizer is not None:
            parts += [(EXP_AVG, state.optimizer.exp_avg), (EXP_AVG_SQ, state.optimizer.exp_avg_sq)]
        for prefix, tensors in parts:
            for name in sorted(tensors):
                yield prefix + name, tensors[name]


def _checksum(metadata: Mapping[str, str], tensors: Iterable[Tensor]) -> str:
    """CRC-32 over metadata and tensors: it finds damage, and is no protection against a forger."""
    checksum = zlib.crc32(canonical_json(dict(metadata)))
    for tensor in tensors:
        checksum = zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).numpy().data, checksum)
    return f"{checksum:08x}"
