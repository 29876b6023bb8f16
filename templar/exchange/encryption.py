"""Encrypted containers: bytes that only the holder of a hotkey can read, and that nobody changes unnoticed.

Layout (docs/protocol.md 4, Private backups): 16 bytes of magic, 32 of salt, then the chunks of AES-256-GCM. Each has
`chunk_bytes` of content, the last one the rest, and a tag of 16 bytes. The key comes by HKDF-SHA256 from the hotkey's
private key and the salt, so each container has a key of its own, and the number of a chunk is a nonce that no other
chunk under that key has. The associated data binds every chunk to network, hotkey, window, its number and the number of
chunks: a chunk that was changed, moved, dropped or taken from another container has a wrong tag.

Both directions hold a few chunks in memory, never the whole.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import BinaryIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from templar.canonical import canonical_json
from templar.chain.hotkey import Signer
from templar.errors import Reason, RejectedError

MAGIC = b"templar-private\x01"
SALT_BYTES, TAG_BYTES, NONCE_BYTES = 32, 16, 12
HEADER_BYTES = len(MAGIC) + SALT_BYTES
CHUNK_BYTES = 1 << 22
_INFO = b"templar.private_backup.v1"


@dataclass(frozen=True)
class Binding:
    """The owner and purpose of a container; another one cannot be read in its place."""

    netuid: int
    genesis: str
    hotkey: str
    window: int

    def chunk(self, number: int, total: int, chunk_bytes: int) -> bytes:
        """The associated data of a chunk."""
        return hashlib.sha256(
            canonical_json({**asdict(self), "chunk": number, "chunks": total, "chunk_bytes": chunk_bytes})
        ).digest()


def encrypt(
    blocks: Iterable[bytes],
    length: int,
    target: BinaryIO,
    *,
    signer: Signer,
    binding: Binding,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Write a container.

    The signer can read it. `binding` says what it belongs to; readers must use the same, and the same `chunk_bytes`.

    Raises:
        ValueError: The blocks have another length together.
    """
    # 1. A salt that was never used, and the key that belongs to it.
    salt, total = os.urandom(SALT_BYTES), max(1, -(-length // chunk_bytes))
    cipher = AESGCM(signer.derive_key(salt, _INFO))
    target.write(MAGIC + salt)

    # 2. Chunk by chunk.
    done = 0
    for number, chunk in enumerate(_rechunked(blocks, chunk_bytes)):
        done += len(chunk)
        target.write(cipher.encrypt(_nonce(number), chunk, binding.chunk(number, total, chunk_bytes)))
    if done != length:
        raise ValueError(f"the content has {done} bytes, and {length} were announced")


def decrypt(
    source: BinaryIO, size: int, *, signer: Signer, binding: Binding, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """The content of a container, chunk by chunk, each verified before it is given out; an empty one if there is none.

    The source is at the first byte of the container, which is `size` bytes long.

    Raises:
        RejectedError: `backup_broken`; it is not such a container, or a chunk is not what was written for this place.
    """
    # 1. The header, and the number of chunks that the size implies.
    header, body = source.read(HEADER_BYTES), size - HEADER_BYTES
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise RejectedError(Reason.BACKUP_BROKEN, "it does not begin like a private backup of this release")
    stored = chunk_bytes + TAG_BYTES
    total = max(1, -(-body // stored))
    cipher = AESGCM(signer.derive_key(header[len(MAGIC) :], _INFO))

    # 2. Chunk by chunk.
    for number in range(total):
        wanted = min(stored, body - number * stored)
        chunk = source.read(max(0, wanted))
        if len(chunk) != wanted or wanted < TAG_BYTES:
            raise RejectedError(Reason.BACKUP_BROKEN, f"chunk {number} of {total} is cut off")
        try:
            yield cipher.decrypt(_nonce(number), chunk, binding.chunk(number, total, chunk_bytes))
        except InvalidTag:
            raise RejectedError(
                Reason.BACKUP_BROKEN,
                f"chunk {number} of {total} is not what hotkey {binding.hotkey} wrote for window {binding.window} of "
                f"the network {binding.genesis[:12]}: it was damaged or moved, or is another hotkey's, window's or "
                "network's",
            ) from None
    if source.read(1):
        raise RejectedError(Reason.BACKUP_BROKEN, "something follows the last chunk")


def _nonce(number: int) -> bytes:
    return number.to_bytes(NONCE_BYTES, "big")


def _rechunked(blocks: Iterable[bytes], chunk_bytes: int) -> Iterator[bytes]:
    """The same bytes in chunks of one length, the last one shorter; one empty chunk if there are no bytes."""
    left, is_first = bytearray(), True
    for block in blocks:
        left += block
        while len(left) >= chunk_bytes:
            yield bytes(left[:chunk_bytes])
            del left[:chunk_bytes]
            is_first = False
    if left or is_first:
        yield bytes(left)
