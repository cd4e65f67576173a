"""A shuffle without a list: a keyed permutation of range(n), computed index by index."""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 8


def permute(indices: np.ndarray, n: int, key: tuple[int, ...]) -> np.ndarray:
    """Return where indices go in the permutation of range(n) that a key names.

    Only integers are computed, so the result is the same on every machine; memory is that of the indices, whatever n
    is. A Feistel network permutes the smallest 4**h >= n numbers; a result outside range(n) is permuted again until it
    is inside ("cycle walking": Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

    Args:
        indices: Integers in [0, n), of any shape.
        n: From 1 to 2**62.
        key: Any integers. Another key gives another permutation.

    Returns:
        int64 of the shape of ``indices``. Over all of range(n), every number comes out exactly once.

    Raises:
        ValueError: ``n`` or an index is out of range.
    """
    indices = np.asarray(indices, dtype=np.int64)
    if not 1 <= n <= 2**62:
        raise ValueError(f"n={n}: a permutation is of 1 to 2**62 numbers")
    if indices.size and not (0 <= indices.min() and indices.max() < n):
        raise ValueError(f"indices run from {indices.min()} to {indices.max()}; they must lie in [0, {n})")

    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    round_keys = _round_keys(key)
    values = _feistel(indices.reshape(-1).astype(np.uint64), half_bits, round_keys)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = _feistel(values[outside], half_bits, round_keys)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64).reshape(indices.shape)


def _round_keys(key: tuple[int, ...]) -> np.ndarray:
    """Return one 64-bit key per round, from a hash of the key's decimal digits (any size and sign of integer)."""
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(values: np.ndarray, half_bits: int, round_keys: np.ndarray) -> np.ndarray:
    """Permute range(4**half_bits): a round xors a hash of one half onto the other, invertibly."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << shift) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
