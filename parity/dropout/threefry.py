"""The masks of jax's random keys, in NumPy: bit for bit those of `jax.random.bernoulli`, without jax.

Source:
    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", Threefry-2x32 with 20 rounds; jax's
    `jax_threefry_partitionable` decides in which order the counters are taken.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from parity.errors import InputError

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)
# Bits of a number, and those of its mantissa that are drawn.
WIDTHS = {"float32": (np.uint32, 32, 23), "float64": (np.uint64, 64, 52)}

Key = np.ndarray


def key_of(seed: int) -> Key:
    """The key of a seed, as `jax.random.key` makes it.

    Args:
        seed: from 0 to 2^64 - 1; without 64-bit types jax takes those below 2^31.

    Returns:
        Two uint32: what `jax.random.key_data` shows.
    """
    if not 0 <= seed < 2**64:
        raise InputError(f"a seed is from 0 to 2^64 - 1, got {seed}; jax takes its lowest 32 or 64 bits")
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def threefry_2x32(key: Key, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Twenty rounds of Threefry on pairs of counters.

    Args:
        key: two uint32.
        first: uint32 of any shape.
        second: likewise.

    Returns:
        Two arrays of that shape.
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    a, b = first + keys[0], second + keys[1]
    for group in range(5):
        for turn in ROTATIONS[group % 2]:
            a = a + b
            b = (b << np.uint32(turn)) | (b >> np.uint32(32 - turn))
            b = a ^ b
        a = a + keys[(group + 1) % 3]
        b = b + keys[(group + 2) % 3] + np.uint32(group + 1)
    return a, b


def fold_in(key: Key, data: int) -> Key:
    """The key that `jax.random.fold_in` makes of a key and a number."""
    zero, number = np.zeros(1, np.uint32), np.array([data & 0xFFFFFFFF], np.uint32)
    with np.errstate(over="ignore"):
        return np.concatenate(threefry_2x32(checked(key), zero, number))


def linen_key(key: Key, path: Sequence[str], count: int) -> Key:
    """The key that a Linen module gets from `make_rng`.

    Args:
        key: that of the stream, as given to `apply`.
        path: names of modules from the root.
        count: which key of the module in this run, from 1.
    """
    name = hashlib.sha1(usedforsecurity=False)
    for part in path:
        name.update(part.encode())
    name.update(count.to_bytes((count.bit_length() + 7) // 8, "big"))
    return fold_in(key, int.from_bytes(name.digest()[:4], "big"))


def random_bits(key: Key, width: int, size: int, *, partitionable: bool = True) -> np.ndarray:
    """Random bits of `jax.random.bits`.

    Args:
        key: two uint32.
        width: 32 or 64.
        size: how many numbers.
        partitionable: jax's `jax_threefry_partitionable`, on since jax 0.5.

    Returns:
        `(size,)` uint32 or uint64.
    """
    with np.errstate(over="ignore"):
        if partitionable:
            counts = np.arange(size, dtype=np.uint64)
            high, low = threefry_2x32(key, (counts >> np.uint64(32)).astype(np.uint32), counts.astype(np.uint32))
            return high ^ low if width == 32 else joined(high, low)
        total = size * width // 32
        if total > 0xFFFFFFFF:
            raise InputError(f"a mask of {size} elements needs jax_threefry_partitionable=True here; give partitionable=True")
        counts = np.arange(total, dtype=np.uint32)
        if total % 2:
            counts = np.append(counts, np.uint32(0))
        bits = np.concatenate(threefry_2x32(key, *np.split(counts, 2)))[:total]
    return bits if width == 32 else joined(*np.split(bits, 2))


def joined(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return (high.astype(np.uint64) << np.uint64(32)) | low


def bernoulli(key: Key, keep: float, shape: Sequence[int], *, dtype: str = "float32", partitionable: bool = True) -> np.ndarray:
    """The mask of `jax.random.bernoulli(key, keep, shape)`, bit for bit.

    Args:
        key: two uint32, as `jax.random.key_data` shows them.
        keep: probability of True.
        shape: of the mask.
        dtype: `float64` if jax has 64-bit types on, where it draws other numbers.
        partitionable: jax's `jax_threefry_partitionable`.

    Returns:
        Booleans of that shape.

    Raises:
        InputError: this is no key, or no dtype of these.
    """
    if dtype not in WIDTHS:
        raise InputError(f"dtype must be float32, or float64 where jax has 64-bit types on, got {dtype!r}")
    integer, width, mantissa = WIDTHS[dtype]
    bits = random_bits(checked(key), width, math.prod(shape), partitionable=partitionable)
    one = np.array(1, dtype)
    # Random mantissas of numbers from 1 up to 2.
    numbers = ((bits >> integer(width - mantissa)) | one.view(integer)).view(dtype) - one
    return (numbers < np.array(keep, dtype)).reshape(tuple(shape))


def checked(key: Key) -> Key:
    """A key as two uint32.

    Raises:
        InputError: it is none.
    """
    array = np.asarray(key)
    if array.shape != (2,) or array.dtype != np.uint32:
        raise InputError(
            f"a threefry key is two uint32, as jax.random.key_data shows them, got {array.dtype} of shape {array.shape}"
        )
    return array
