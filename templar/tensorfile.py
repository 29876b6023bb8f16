"""Safetensors files that are written and read one tensor at a time.

`safetensors.torch.save_file` needs all tensors at once and copies them into bytes. Here the header is written first,
from names and shapes alone, and then one tensor after the other, so a file takes no more memory than its largest
tensor. Any reader of safetensors reads these files. All tensors are float32.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import safe_open
from torch import Tensor

from templar.errors import PermanentError, Reason, one_line, parsing

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_FLOAT32, _FLOAT32_BYTES = "F32", 4
MAX_HEADER_BYTES = 1 << 24
"""Most bytes of a header where no model bounds it. Parsing takes 25 times as much memory, and half a second per MB."""


def header_bytes(shapes: Mapping[str, Sequence[int]]) -> int:
    """Most bytes of the headers of these tensors' files together, each of which has one tensor at least.

    1280 bytes are twice what an entry and a file's metadata take. JSON may escape a character in 6 bytes.
    """
    return sum(6 * len(name) + 1280 for name in shapes)


def header_size(path: Path) -> int:
    """Read from a safetensors file's first bytes where its tensors begin."""
    with path.open("rb") as file:
        return _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")


@contextmanager
def reading_header(path: Path, reason: Reason, most: int) -> Iterator[int]:
    """Run a parser of a safetensors file as in `parsing`; yields the header's size, `most` bytes at most."""
    try:
        size = header_size(path)
    except OSError as error:
        raise PermanentError(reason, f"{path}: cannot be read: {error.strerror}") from None
    with parsing(f"{path}: header", reason, size=size, most=most):
        yield size


def stream_tensors(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a file, tensor by tensor in the order of `shapes`; each is written before the next is asked for.

    The file is overwritten, and whole at the end. ValueError if a tensor, of any device, is not the next one of
    `shapes`, or the last one does not come; OSError if the disk failed or is full.
    """
    header: dict[str, object] = {_METADATA: dict(metadata)}
    offset = 0
    for name, shape in shapes.items():
        end = offset + _FLOAT32_BYTES * math.prod(shape)
        header[name] = {"dtype": _FLOAT32, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # the tensors are aligned
    left = {name: tuple(shape) for name, shape in shapes.items()}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for name, tensor in tensors:
            found, wanted = (name, tuple(tensor.shape)), next(iter(left.items()), None)
            if found != wanted or tensor.dtype is not torch.float32:
                raise ValueError(f"{path}: {found} in {tensor.dtype} is not the next float32 tensor, {wanted}")
            file.write(tensor.detach().cpu().contiguous().reshape(-1).numpy().data)
            del left[name], tensor  # its memory is free before the next one is asked for
    if left:
        raise ValueError(f"{path}: {len(left)} tensors were not written, such as {min(left)!r}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of tensors that nothing changes meanwhile."""
    stream_tensors(path, {name: tensor.shape for name, tensor in tensors.items()}, tensors.items())


class MadeTensors(Mapping[str, Tensor]):
    """Tensors that are made at each access, and whose shapes are known without it."""

    shapes: dict[str, tuple[int, ...]]  # by name

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class StoredTensors(MadeTensors):
    """The tensors of a file whose names have a prefix, by the rest of the name; each access reads one from the disk.

    Nobody changes the file. `bad_state_file` if it is not safetensors, is cut off, or not all of it is float32; reading
    a tensor raises the same.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        # 1. The library checks that header, offsets and length fit together.
        with reading_header(path, Reason.BAD_STATE_FILE, MAX_HEADER_BYTES) as start:
            with safe_open(path, framework="pt") as file:
                self.metadata: Mapping[str, str] = file.metadata() or {}
            with path.open("rb") as plain:
                header = json.loads(plain.read(start)[_LENGTH_BYTES:])

        # 2. Where each tensor lies.
        header.pop(_METADATA, None)
        if wrong := [name for name, entry in header.items() if entry["dtype"] != _FLOAT32]:
            raise PermanentError(Reason.BAD_STATE_FILE, f"{path}: tensor {one_line(wrong[0])!r} is not float32")
        self.path, self.prefix = path, prefix
        self.shapes = {}
        self._offsets: dict[str, int] = {}
        for name, entry in header.items():
            if name.startswith(prefix):
                self.shapes[name.removeprefix(prefix)] = tuple(entry["shape"])
                self._offsets[name.removeprefix(prefix)] = start + entry["data_offsets"][0]

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.empty(self.shapes[name])
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self._offsets[name])
                missing = tensor.view(-1).numpy().data.cast("B") if tensor.numel() else memoryview(b"")
                while missing and (count := file.readinto(missing)):  # one call reads 2 GiB at most
                    missing = missing[count:]
        except OSError as error:
            raise PermanentError(Reason.BAD_STATE_FILE, f"{self.path}: {name!r} cannot be read: {error}") from None
        if missing:
            raise PermanentError(Reason.BAD_STATE_FILE, f"{self.path}: {name!r} is cut off")
        return tensor


class LessShare(MadeTensors):
    """Tensors less a share of others of the same names and shapes, made at each access."""

    def __init__(self, tensors: Mapping[str, Tensor], others: Mapping[str, Tensor], share: float) -> None:
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._tensors, self._others, self._share = tensors, others, share

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name] - self._share * self._others[name]


class Zeros(MadeTensors):
    """Zeros of these shapes, made at each access."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}

    def __getitem__(self, name: str) -> Tensor:
        return torch.zeros(self.shapes[name])


def own_tensor(tensors: Mapping[str, Tensor], name: str, place: torch.device) -> Tensor:
    """A tensor on a device, that its caller alone has: a copy, unless each access makes a new one already."""
    return tensors[name].to(place, copy=not isinstance(tensors, MadeTensors))
