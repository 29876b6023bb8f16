"""Payloads as bytes: one version, one encoding for every payload, and an answer for every byte string.

All numbers are little-endian. Nothing is compressed or typed by the sender, so the length is known before a byte is
read, and nothing in here can run code or allocate more than about the size of the payload itself.

    header, 96 bytes
        magic "TPLP" | version u16 | uid u16 | window u64 | layout digest, 32 bytes
        | hotkey, 48 bytes of printable ASCII, zero bytes after its end
    one section for each tensor, in name order, of C chunks with k coefficients
        scale codes, C x u16 | indices, C x k x u16 | signs, C x k bits
        (1 is negative, least significant bit first, zero bits up to a whole 16-bit word)
    checksum, 4 bytes
        CRC-32 of all that comes before

The checksum finds a damaged file. It is no defence against its author, and need not be one: the signed manifest holds
the SHA-256 of the bytes, and whatever an author writes is checked field by field.
"""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from templar import PROTOCOL_VERSION
from templar.errors import Reason, RejectedError
from templar.gradient.layout import CHECKSUM_BYTES, HEADER_BYTES, Layout, TensorLayout
from templar.gradient.payload import Coefficients, Header, Payload
from templar.gradient.values import legal_scales

MAGIC = b"TPLP"
VERSION = int(PROTOCOL_VERSION)
MAX_HOTKEY_BYTES = 48
_HEADER = struct.Struct(f"<4sHHQ32s{MAX_HOTKEY_BYTES}s")
_CHECKSUM = struct.Struct("<I")
_WORD = np.dtype("<u2")


def encode(payload: Payload, layout: Layout) -> bytes:
    """The bytes of a payload.

    Raises:
        ValueError: The payload is not legal for this layout; nobody would accept its bytes.
    """
    if tuple(sorted(payload.tensors)) != layout.names:
        raise ValueError("the payload does not have exactly the tensors of the layout")
    parts = [_encode_header(payload.header, layout)]
    for tensor in layout.tensors:
        coefficients = payload.tensors[tensor.name]
        try:
            _check_section(coefficients, tensor)
        except RejectedError as error:
            raise ValueError(f"this payload would be rejected: {error}") from error
        parts.append(coefficients.scales.astype(_WORD).tobytes())
        parts.append(coefficients.indices.astype(_WORD).tobytes())
        signs = np.packbits(coefficients.negative, bitorder="little").tobytes()
        parts.append(signs.ljust(tensor.sign_bytes, b"\0"))
    body = b"".join(parts)
    return body + _CHECKSUM.pack(zlib.crc32(body))


def decode(data: bytes, layout: Layout) -> Payload:
    """Read a payload. The arrays of the result are read-only; indices and scales are views of `data`.

    Args:
        data: Anything that somebody published.
        layout: The tensors that it must hold.

    Raises:
        RejectedError: `malformed` (no payload, or damaged), `wrong_version`, `wrong_size`, `wrong_shapes` (made for
            another layout), `bad_payload` (a scale or an index out of range), `not_canonical` (not the one way to
            write it). No other error, whatever the bytes are.
    """
    header = _decode_header(data, layout)
    tensors: dict[str, Coefficients] = {}
    offset = HEADER_BYTES
    for tensor in layout.tensors:
        tensors[tensor.name] = _decode_section(data, offset, tensor)
        offset += tensor.section_bytes
    return Payload(header, tensors)


def _encode_header(header: Header, layout: Layout) -> bytes:
    hotkey = header.hotkey.encode()
    if len(hotkey) > MAX_HOTKEY_BYTES or not _is_name(hotkey):
        raise ValueError(f"hotkey {header.hotkey!r} is not 1 to {MAX_HOTKEY_BYTES} printable ASCII characters")
    if not (0 <= header.uid < 2**16 and 0 <= header.window < 2**64):
        raise ValueError(f"uid {header.uid} or window {header.window} is out of range")
    if header.layout_digest != layout.digest:
        raise ValueError(f"the payload is for layout {header.layout_digest[:12]}, not for {layout.digest[:12]}")
    return _HEADER.pack(MAGIC, VERSION, header.uid, header.window, bytes.fromhex(layout.digest), hotkey)


def _decode_header(data: bytes, layout: Layout) -> Header:
    if len(data) < HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        raise RejectedError(Reason.MALFORMED, f"{len(data)} bytes that do not begin like a payload")
    _, version, uid, window, digest, padded_hotkey = _HEADER.unpack_from(data)
    if version != VERSION:
        raise RejectedError(Reason.WRONG_VERSION, f"payload of version {version}; this node speaks {VERSION}")
    if digest.hex() != layout.digest:
        raise RejectedError(
            Reason.WRONG_SHAPES, f"payload for layout {digest.hex()[:12]}; this model's is {layout.digest[:12]}"
        )
    if len(data) != layout.max_payload_bytes:
        raise RejectedError(Reason.WRONG_SIZE, f"payload of {len(data)} bytes; legal are {layout.max_payload_bytes}")
    body = memoryview(data)[:-CHECKSUM_BYTES]
    if _CHECKSUM.unpack_from(data, len(body))[0] != zlib.crc32(body):
        raise RejectedError(Reason.MALFORMED, "payload is damaged: its checksum differs")
    hotkey = padded_hotkey.rstrip(b"\0")
    if not _is_name(hotkey):
        raise RejectedError(Reason.MALFORMED, "payload header: the hotkey is not printable ASCII")
    return Header(window, uid, hotkey.decode("ascii"), digest.hex())


def _decode_section(data: bytes, offset: int, tensor: TensorLayout) -> Coefficients:
    shape = (tensor.num_chunks, tensor.k)
    scales = np.frombuffer(data, _WORD, tensor.num_chunks, offset)
    offset += scales.nbytes
    indices = np.frombuffer(data, _WORD, tensor.num_coefficients, offset).reshape(shape)
    offset += indices.nbytes
    packed = np.frombuffer(data, np.uint8, tensor.sign_bytes, offset)
    bits = np.unpackbits(packed, bitorder="little")
    if bits[tensor.num_coefficients :].any():
        raise RejectedError(Reason.NOT_CANONICAL, f"{tensor.name}: bits are set after the last sign")
    negative = bits[: tensor.num_coefficients].view(np.bool_).reshape(shape)
    negative.flags.writeable = False
    coefficients = Coefficients(indices, negative, scales)
    _check_section(coefficients, tensor)
    return coefficients


def _check_section(coefficients: Coefficients, tensor: TensorLayout) -> None:
    """What is legal in a section, for writer and reader alike."""
    indices, negative, scales = coefficients.indices, coefficients.negative, coefficients.scales
    shape = (tensor.num_chunks, tensor.k)
    if indices.shape != shape or negative.shape != shape or scales.shape != shape[:1]:
        raise RejectedError(Reason.WRONG_SHAPES, f"{tensor.name}: not {shape[0]} chunks of {shape[1]} coefficients")
    if not legal_scales(scales):
        raise RejectedError(Reason.BAD_PAYLOAD, f"{tensor.name}: a scale code is out of range")
    if indices.max() >= tensor.chunk_length:
        raise RejectedError(Reason.BAD_PAYLOAD, f"{tensor.name}: an index is beyond {tensor.chunk_length - 1}")
    if (indices[:, 1:] <= indices[:, :-1]).any():
        raise RejectedError(Reason.NOT_CANONICAL, f"{tensor.name}: indices of a chunk do not ascend")
    if not _silent_chunks_are_canonical(indices, negative, scales):
        raise RejectedError(Reason.NOT_CANONICAL, f"{tensor.name}: a chunk of scale 0 carries indices or signs")


def _silent_chunks_are_canonical(
    indices: NDArray[np.uint16], negative: NDArray[np.bool_], scales: NDArray[np.uint16]
) -> bool:
    silent = scales == 0
    return bool((indices[silent] == np.arange(indices.shape[1])).all()) and not negative[silent].any()


def _is_name(hotkey: bytes) -> bool:
    return bool(hotkey) and all(0x20 < byte < 0x7F for byte in hotkey)
