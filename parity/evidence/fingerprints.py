"""Fingerprints of arrays: a few numbers that no transposition, reshape or repetition changes, and how near two are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# What is larger counts as hidden, whatever the number: -inf, -1e20 and the least float32 all mean the same to a softmax.
HUGE = 1e15
# Shares are counts over a count: they differ by one in a trillion elements, or by rounding.
SHARES = 1e-12


@dataclass(frozen=True)
class Axis:
    """The averages of an array over all axes but one.

    Attributes:
        means: of the values, one for each index.
        squares: of their squares.
    """

    means: np.ndarray
    squares: np.ndarray


@dataclass(frozen=True)
class Fingerprint:
    """What is kept of an array.

    Attributes:
        shape: of the array.
        moments: mean, mean magnitude, root mean square, largest and smallest, of what is not huge. Averages, so
            that an array and its repetition along an axis are alike. Of booleans nothing tells which one hides,
            so that a mask and its negation are alike.
        shares: of the elements that are huge, that are huge and negative, that are NaN.
        infinite: the share that is infinite.
        scale: the largest magnitude that is not huge.
        axes: one for each axis longer than 1.
    """

    shape: tuple[int, ...]
    moments: np.ndarray
    shares: tuple[float, float, float]
    infinite: float
    scale: float
    axes: tuple[Axis, ...]

    @property
    def uniform(self) -> bool:
        """Whether all elements are the same number."""
        huge, negative, nan = self.shares
        all_huge = huge == 1.0 and negative in (0.0, 1.0)
        return all_huge or nan == 1.0 or (huge == nan == 0.0 and bool(self.moments[3] == self.moments[4]))


def fingerprint(array: np.ndarray) -> Fingerprint:
    """The fingerprint of an array of numbers or booleans; complex numbers count by their parts.

    Args:
        array: any shape; everything is computed in float64.
    """
    values = np.asarray(array)
    boolean = values.dtype == np.bool_
    if values.dtype.kind == "c":
        values = np.stack([values.real, values.imag], axis=-1)
    with np.errstate(all="ignore"):
        values = values.astype(np.float64)
        nan, huge = np.isnan(values), np.abs(values) >= HUGE
        ordinary = ~(nan | huge)
        size = max(1, values.size)
        shares = (float(huge.sum() / size), float((huge & (values < 0)).sum() / size), float(nan.sum() / size))
        infinite = float(np.isinf(values).sum() / size)
        kept = values if ordinary.all() else np.where(ordinary, values, 0.0)
        if boolean:
            return Fingerprint(values.shape, *of_booleans(kept, shares))
        count = max(1, int(ordinary.sum()))
        squares = kept * kept
        largest, smallest = (float(f(values[ordinary])) for f in (np.max, np.min)) if ordinary.any() else (0.0, 0.0)
        moments = np.array([kept.sum() / count, np.abs(kept).sum() / count, np.sqrt(squares.sum() / count), largest, smallest])
        scale = max(abs(largest), abs(smallest))
        return Fingerprint(values.shape, moments, shares, infinite, scale, axes_of(kept, squares))


def of_booleans(values: np.ndarray, shares: tuple[float, float, float]) -> tuple[Any, ...]:
    """The parts of a mask's fingerprint: how far from half of it is True, over all and along each axis."""
    share = abs(float(values.mean()) - 0.5) if values.size else 0.0
    half = tuple(Axis(np.abs(a.means - 0.5), np.abs(a.squares - 0.5)) for a in axes_of(values, values))
    uniform = share == 0.5
    return np.array([share, share, share, 1.0, 1.0 if uniform else 0.0]), shares, 0.0, 1.0, half


def axes_of(values: np.ndarray, squares: np.ndarray) -> tuple[Axis, ...]:
    long = [axis for axis, size in enumerate(values.shape) if size > 1]
    others = [tuple(a for a in range(values.ndim) if a != axis) for axis in long]
    return tuple(Axis(values.mean(rest), squares.mean(rest)) for rest in others)


def apart(one: Fingerprint, other: Fingerprint) -> float:
    """How far two arrays are from holding the same numbers, in units of the larger scale; 0 if rearranged or repeated."""
    if any(abs(a - b) > SHARES for a, b in zip(one.shares, other.shares, strict=True)):
        return float("inf")
    scale = max(one.scale, other.scale)
    return float(np.abs(one.moments - other.moments).max() / scale) if scale else 0.0


def same(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether two fingerprints are those of the same array, number by number as far as they tell."""
    return one.shape == other.shape and one.shares == other.shares and bool((one.moments == other.moments).all())


def same_layout(one: Fingerprint, other: Fingerprint, tolerance: float) -> bool:
    """Whether two arrays of the same numbers are each other's transpose, as far as sums along axes tell.

    Axes of length 1 do not count.
    """
    left = list(other.axes)
    scale = max(one.scale, other.scale) or 1.0
    for axis in one.axes:
        found = next((b for b in left if near(axis, b, tolerance, scale)), None)
        if found is None:
            return False
        left = [b for b in left if b is not found]
    return not left


def near(one: Axis, other: Axis, tolerance: float, scale: float) -> bool:
    return one.means.shape == other.means.shape and bool(
        np.abs(one.means - other.means).max() <= tolerance * scale
        and np.abs(one.squares - other.squares).max() <= tolerance * scale**2
    )


def comparable(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether two arrays have the same axes, in whatever order, so that their layouts can be compared."""
    return sorted(a.means.size for a in one.axes) == sorted(a.means.size for a in other.axes)


class Table:
    """Fingerprints laid side by side, so that those of the same numbers are found at once."""

    def __init__(self, fingerprints: Sequence[Fingerprint]):
        self.moments = np.array([f.moments for f in fingerprints]).reshape(-1, 5)
        self.shares = np.array([f.shares for f in fingerprints]).reshape(-1, 3)
        self.scales = np.array([f.scale for f in fingerprints])

    def like(self, one: Fingerprint, tolerance: float) -> list[int]:
        """The places of those that hold the same numbers, rearranged or repeated."""
        scales = np.maximum(self.scales, one.scale)
        gaps = np.abs(self.moments - one.moments).max(1)
        shares = np.abs(self.shares - np.array(one.shares)).max(1, initial=0.0)
        return [int(i) for i in np.flatnonzero((gaps <= tolerance * scales) & (shares <= SHARES))]
