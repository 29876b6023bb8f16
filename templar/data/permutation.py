"""A keyed permutation of 0..n-1, computed one element at a time.

Nothing of size n is stored unless all elements are asked for, so it serves a dozen slots and a hundred million samples
alike, and it is the same on every machine and for every version of every library.

The construction is the alternating Feistel network of format-preserving encryption (Bellare, Ristenpart, Rogaway,
Stegers, "Format-Preserving Encryption", SAC 2009): numbers are pairs (left, right) in a x b with a * b >= n, even
rounds add a keyed hash of `right` to `left` modulo a, odd rounds one of `left` to `right` modulo b. Values that fall
beyond n are encrypted again until they fall within (cycle walking); since a * b - n < a, that is rare.

Exactly: a is the least integer with a * a >= n, b the least with a * b >= n; a value is left * b + right. The hash of
round i is the first 16 bytes, little-endian, of SHA-256 over the round key and the half as 8 bytes, little-endian; the
round key is `keyed_seed("templar.permutation", i, n, *key)` as 16 bytes, little-endian.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from templar.canonical import keyed_seed

NUM_ROUNDS = 8
_DOMAIN = "templar.permutation"


class Permutation:
    """A bijection of 0..size-1; the key, whose parts are as in `keyed_seed`, tells it from all others of its size."""

    def __init__(self, size: int, *key: str | int) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, not {size}")
        self._size = size
        self._left_size = math.isqrt(size - 1) + 1
        self._right_size = -(-size // self._left_size)
        self._round_keys = [
            keyed_seed(_DOMAIN, number, size, *key).to_bytes(16, "little") for number in range(NUM_ROUNDS)
        ]

    def __len__(self) -> int:
        return self._size

    def at(self, position: int) -> int:
        """The element at a position. ValueError: The position is not in 0..size-1."""
        if not 0 <= position < self._size:
            raise ValueError(f"position {position} is not in 0..{self._size - 1}")
        element = self._encrypt(position, self._hash)
        while element >= self._size:
            element = self._encrypt(element, self._hash)
        return element

    def elements(self) -> NDArray[np.int64]:
        """The elements at all positions, shape (size,): `at(0)`, `at(1)` and so on."""
        # There are about sqrt(size) values of each half, so every hash is computed once, not once per element.
        hashes = [self._hashes(number) for number in range(NUM_ROUNDS)]

        def look_up(number: int, halves: NDArray[np.int64]) -> NDArray[np.int64]:
            return hashes[number][halves]

        elements = self._encrypt(np.arange(self._size, dtype=np.int64), look_up)
        while (beyond := np.flatnonzero(elements >= self._size)).size:
            elements[beyond] = self._encrypt(elements[beyond], look_up)
        return elements

    def _encrypt(self, value: Any, added: Callable[[int, Any], Any]) -> Any:
        """Encrypt a number or an array of them; `added` gives what a round adds for the half that it hashes."""
        left, right = divmod(value, self._right_size)
        for number in range(NUM_ROUNDS):
            if number % 2 == 0:
                left = (left + added(number, right)) % self._left_size
            else:
                right = (right + added(number, left)) % self._right_size
        return left * self._right_size + right

    def _hashes(self, number: int) -> NDArray[np.int64]:
        """The number that a round adds for every value of the half that it hashes, modulo the other half's size."""
        halves, modulus = self._right_size, self._left_size
        if number % 2 == 1:
            halves, modulus = modulus, halves
        return np.fromiter((self._hash(number, half) % modulus for half in range(halves)), np.int64, halves)

    def _hash(self, number: int, half: int) -> int:
        digest = hashlib.sha256(self._round_keys[number] + half.to_bytes(8, "little")).digest()
        return int.from_bytes(digest[:16], "little")
