"""How a difference lies in an array: figures of bounded size, from which a report draws."""

from dataclasses import dataclass

import numpy as np

# Powers of ten of an error over what rounding explains: outside them, the first and the last bin.
ERRORS = np.arange(-4.0, 12.5, 0.5)
# Magnitudes in powers of two, counted down from the largest value of the array.
MAGNITUDES = 16
# Cells of the map, at most: below a hundred kilobytes of HTML for a hundred modules.
ROWS, COLUMNS = 24, 32


@dataclass(frozen=True)
class Picture:
    """The differences between two arrays, summed up.

    Attributes:
        output: path of the output in what the module returns.
        shape: of the array, torch's.
        equal: how many values are equal.
        histogram: how many values have an error within each of `ERRORS`' bins, equal ones left out.
        by_magnitude: the same for each power of two of the expected value below the largest, `(MAGNITUDES, bins)`.
        axes: the two axes of the map, the longest ones.
        map: the largest error over what rounding explains in each cell, `(<= ROWS, <= COLUMNS)`.
    """

    output: str
    shape: tuple[int, ...]
    equal: int
    histogram: tuple[int, ...]
    by_magnitude: tuple[tuple[int, ...], ...]
    axes: tuple[int, ...]
    map: tuple[tuple[float, ...], ...]


def picture(output: str, expected: np.ndarray, actual: np.ndarray, allowed: float) -> Picture | None:
    """The differences between two real arrays of one shape; None where there is nothing to draw.

    Args:
        output: path of the output.
        expected: torch's values.
        actual: Flax's values.
        allowed: what rounding explains, the same for all values.
    """
    if not expected.size or expected.shape != actual.shape or not allowed > 0:
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(actual - expected)
        if not np.isfinite(error.max()):
            # NaN and infinity on both sides are equal, on one side an error without bound.
            error = np.where((expected == actual) | (np.isnan(expected) & np.isnan(actual)), 0.0, error)
            error = np.nan_to_num(error, nan=np.inf, posinf=np.inf)
        error /= allowed
    wrong = error > 0
    bins = binned(error[wrong])
    levels = magnitude(expected)[wrong]
    counts = np.bincount(levels * (len(ERRORS) + 1) + bins, minlength=MAGNITUDES * (len(ERRORS) + 1))
    table = counts.reshape(MAGNITUDES, len(ERRORS) + 1)
    axes, cells = cells_of(error)
    return Picture(
        output,
        expected.shape,
        int((~wrong).sum()),
        tuple(int(n) for n in table.sum(0)),
        tuple(tuple(int(n) for n in row) for row in table),
        axes,
        tuple(tuple(float(f"{v:.3g}") for v in row) for row in np.minimum(cells, 1e300)),
    )


def binned(error: np.ndarray) -> np.ndarray:
    return np.searchsorted(ERRORS, np.log10(np.minimum(error, 1e300)), side="right")


def magnitude(expected: np.ndarray) -> np.ndarray:
    """For each value, how many powers of two below the largest it lies, in `MAGNITUDES` steps."""
    size = np.abs(np.nan_to_num(expected, nan=0.0, posinf=0.0, neginf=0.0))
    top = float(size.max()) or 1.0
    with np.errstate(divide="ignore"):
        below = np.floor(-np.log2(size / top))
    return np.clip(np.nan_to_num(below, posinf=MAGNITUDES - 1), 0, MAGNITUDES - 1).astype(np.int64)


def cells_of(error: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
    """The two longest axes, and the largest error on a grid over them, all other axes taken together."""
    axes = tuple(sorted(sorted(range(error.ndim), key=lambda axis: -error.shape[axis])[:2]))
    plane = error.max(axis=tuple(axis for axis in range(error.ndim) if axis not in axes))
    plane = plane.reshape((1,) * (2 - plane.ndim) + plane.shape)
    for axis, most in enumerate((ROWS, COLUMNS)):
        length = plane.shape[axis]
        starts = np.unique(np.linspace(0, length, min(length, most), endpoint=False).astype(np.int64))
        plane = np.maximum.reduceat(plane, starts, axis=axis)
    return axes, plane
