"""Compare arrays and trees of arrays. NumPy only."""

import sys
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from parity.errors import InputError, first_line
from parity.evidence.numerics import UNIT, finite_scale, same_specials, ulp_distance, wide
from parity.evidence.result import ArrayDiff, Diff
from parity.evidence.trees import flatten


def diff(actual: Any, expected: Any, tolerance: float | Mapping[str, float] | None = None) -> Diff:
    """Compare two arrays, or two trees of arrays, leaf by leaf.

    Structure comes first: a missing leaf, another shape or dtype is a difference whatever the
    numbers. NaN equals NaN, an infinity equals itself, nothing is broadcast.

    Args:
        actual: an array of NumPy, torch or jax, a number, or nested tuples, lists and mappings of them.
        expected: likewise.
        tolerance: None wants equal bits (+0.0 and -0.0 count as equal). A number t allows
            `|actual - expected| <= t * max|expected|` in each leaf of floating point or complex
            numbers; whole numbers and booleans must be equal. A mapping may give `atol`,
            `rtol` (of the element) and `scaled` (of the leaf's largest element); what any of
            them allows, summed, is allowed.

    Returns:
        One entry for each leaf, with the smallest absolute tolerance that would have passed.

    Raises:
        InputError: a tolerance is negative, NaN or unknown, or a leaf is no array.
    """
    allowed = checked_tolerance(tolerance)
    want = {path: as_array(path, leaf) for path, leaf in flatten(expected, is_array)}
    have = {path: as_array(path, leaf) for path, leaf in flatten(actual, is_array)}
    leaves = []
    for path in [*want, *(p for p in have if p not in want)]:
        if path not in have or path not in want:
            side = "expected" if path in want else "actual"
            leaves.append(ArrayDiff(path, False, f"only {side} has it"))
        else:
            leaves.append(compare_arrays(path, have[path], want[path], allowed))
    return Diff(tuple(leaves))


def checked_tolerance(tolerance: float | Mapping[str, float] | None) -> dict[str, float]:
    if tolerance is None:
        return {}
    given = dict(tolerance) if isinstance(tolerance, Mapping) else {"scaled": tolerance}
    bad = {k: v for k, v in given.items() if k not in ("atol", "rtol", "scaled") or not isinstance(v, Real) or not v >= 0}
    if bad:
        raise InputError(f"tolerance takes atol, rtol and scaled, each at least 0, got {bad}")
    return {key: float(value) for key, value in given.items()}


def is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and hasattr(value, "shape")


def as_array(path: str, leaf: Any) -> np.ndarray:
    """A leaf of any framework in NumPy.

    Raises:
        InputError: it is no array and no number.
    """
    if "torch" in sys.modules and isinstance(leaf, sys.modules["torch"].Tensor):
        from parity.frameworks import load

        try:
            return load("torch").to_numpy(leaf)
        except InputError as error:
            raise InputError(f"{path or 'the value'}: {error}") from None
    try:
        array = np.asarray(leaf)
    except TypeError as error:
        raise InputError(f"{path or 'the value'} is no array of numbers: {first_line(error)}") from None
    if array.dtype.kind in "OUSM":
        raise InputError(f"{path or 'the value'} is no array of numbers: {type(leaf).__name__}")
    return array


def compare_arrays(path: str, actual: np.ndarray, expected: np.ndarray, allowed: Mapping[str, float]) -> ArrayDiff:
    """One leaf: shape, then dtype, then NaN and infinities, then numbers."""
    if actual.shape != expected.shape:
        return ArrayDiff(path, False, f"shape {actual.shape}, expected {expected.shape}", elements=expected.size)
    if actual.dtype != expected.dtype:
        return ArrayDiff(path, False, f"dtype {actual.dtype}, expected {expected.dtype}", elements=expected.size)
    gap, magnitude, special = measured(actual, expected)
    scale, largest = finite_scale(magnitude), float(gap.max(initial=0.0))
    unit = UNIT.get(str(expected.real.dtype), 0.0)
    # Ids, counts and switches are not measured: they are the same or they are not.
    inexact = expected.dtype.kind not in "biu"
    with np.errstate(over="ignore"):
        limit = allowed.get("atol", 0.0) + allowed.get("scaled", 0.0) * scale + allowed.get("rtol", 0.0) * magnitude
        scaled = largest / (unit * scale) if unit * scale else 0.0
    wrong = (gap > limit) | special if inexact else actual != expected
    if not wrong.any():
        return ArrayDiff(path, True, elements=expected.size, difference=largest, scaled=scaled)
    order = np.where(special, np.inf, np.where(wrong, gap, -1.0))
    at = tuple(int(i) for i in np.unravel_index(int(order.argmax()), order.shape))
    reason = "NaN or infinity on one side only" if special.any() else "values differ"
    return ArrayDiff(
        *(path, False, reason, int(wrong.sum()), expected.size, at, actual[at].item(), expected[at].item(), largest),
        ulp=worst_ulp(actual, expected),
        scaled=scaled,
        atol=largest if inexact and not special.any() else None,
    )


def measured(actual: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distance and magnitude where both are finite, 0 elsewhere; and where NaN or infinities do not agree."""
    if expected.dtype.kind in "biu":
        # Neither 64-bit integers nor their differences fit a float or an int of 64 bits.
        a, b = actual.astype(object), expected.astype(object)
        gap, magnitude = np.asarray(np.abs(a - b), np.float64), np.asarray(np.abs(b), np.float64)
        return gap, magnitude, np.zeros(b.shape, bool)
    if expected.dtype.kind == "c":
        special = ~(same_specials(actual.real, expected.real) & same_specials(actual.imag, expected.imag))
        a, b = actual.astype(np.complex128), expected.astype(np.complex128)
    else:
        special = ~same_specials(actual, expected)
        a, b = wide(actual), wide(expected)
    finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(over="ignore"):
        gap = np.abs(np.where(finite, a, 0) - np.where(finite, b, 0))
        return gap, np.abs(np.where(finite, b, 0)), special


def worst_ulp(actual: np.ndarray, expected: np.ndarray) -> int | None:
    """Largest distance in representable numbers among values that are not tiny beside the largest."""
    if str(expected.dtype) not in UNIT:
        return None
    a, b = wide(actual), wide(expected)
    # Values near zero own any relative measure without meaning anything.
    large = np.isfinite(a) & np.isfinite(b) & (np.abs(b) >= finite_scale(b) / 16)
    return int(ulp_distance(actual[large], expected[large]).max()) if large.any() else None
