"""How far apart two arrays are, and how far apart rounding alone can bring them. NumPy only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

# Unit roundoff: half the distance from 1 to the next number.
UNIT = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}

# Semantics: both sides in float64. Over 3,024 clean trials the largest ratio was 6.8 of the
# allowed 64, the smallest of a weight moved by one ulp 2,700 (project record, torch 2.13, jax 0.10).
SEMANTICS_FACTOR = 64.0
# How many denormal terms of a sum may be lost: a gradient through 300 layers lost 1.2 (torch 2.13, jax 0.10).
FLUSHED = 64
# Beside a value that much larger, float32 loses the smaller one whole.
APART = 2.0**24
# Float32 noise of torch in units of float64: 2^-53 / 2^-24.
FLOAT32_TO_FLOAT64 = 2.0**-29


def ulp_distance(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Count the representable numbers between two float arrays, elementwise.

    The unit means the same near 1e-30 and near 1e30: 0 is bit-equal (+0.0 and -0.0 count as
    equal), 1 is the next number.

    Args:
        actual: any shape, finite, of a floating point dtype of 16, 32 or 64 bits.
        expected: same shape and dtype as `actual`, finite.

    Returns:
        int64 array of that shape, in ulp. Distances beyond 2^63 are cut there.

    Raises:
        ValueError: shapes or dtypes differ, or a value is NaN or infinite.

    Source:
        Goldberg 1991, "What every computer scientist should know about floating-point
        arithmetic", section 1.2.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise ValueError(
            f"ulp_distance wants equal shapes and dtypes, got {actual.shape} {actual.dtype} "
            f"and {expected.shape} {expected.dtype}"
        )
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        raise ValueError("ulp_distance wants finite values; compare NaN and infinite positions first")
    a, b = ordered(actual), ordered(expected)
    low, high = np.minimum(a, b), np.maximum(a, b)
    # Both fit in int64; their difference may not, so it is taken without sign.
    distance = high.astype(np.uint64) - low.astype(np.uint64)
    return np.minimum(distance, np.uint64(2**63 - 1)).astype(np.int64)


def ordered(array: np.ndarray) -> np.ndarray:
    """Floats as int64 in the same order, consecutive for consecutive floats."""
    width = array.dtype.itemsize * 8
    bits = np.ascontiguousarray(array).view(f"int{width}").astype(np.int64)
    return np.where(bits < 0, np.int64(-(2 ** (width - 1))) - bits, bits)


def neighbours(array: np.ndarray, steps: np.ndarray | int) -> np.ndarray:
    """The floats that many representable numbers further up (down for negative steps)."""
    width = array.dtype.itemsize * 8
    moved = ordered(array) + np.asarray(steps, np.int64)
    bits = np.where(moved < 0, np.int64(-(2 ** (width - 1))) - moved, moved)
    return bits.astype(f"int{width}").view(array.dtype)


def same_bits(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Where two arrays of one dtype hold the same number: equal, or both NaN. Shapes must be equal."""
    if actual.dtype.kind in "biu":
        return actual == expected
    a, b = actual, expected
    return (a == b) | ((a != a) & (b != b))


def wide(array: np.ndarray) -> np.ndarray:
    """The array in float64."""
    return np.asarray(array).astype(np.float64)


def comparable(actual: Any, expected: np.ndarray) -> TypeGuard[np.ndarray]:
    """Whether an output can be compared value by value: an array of the same shape, complex only if both are."""
    if not isinstance(actual, np.ndarray) or actual.shape != expected.shape:
        return False
    return (actual.dtype.kind == "c") == (expected.dtype.kind == "c")


def finite_scale(array: np.ndarray) -> float:
    """Largest finite magnitude, 0 if there is none."""
    values = np.abs(wide(array))
    values = values[np.isfinite(values)]
    return float(values.max()) if values.size else 0.0


def alike(array: np.ndarray) -> list[Any]:
    """Indices of the values that can be judged by one magnitude.

    A hidden score of -1e20 says nothing of how exact the others are: where magnitudes in order
    leap by `APART` or more, to `APART` or more, what lies above is apart from what lies below.
    Small values stay with larger ones: a softmax weight of 1e-60 is as exact as its scores were.
    """
    magnitude = np.abs(array)
    finite = magnitude[np.isfinite(magnitude)]
    if not finite.size or finite.max() < APART:
        return [...]
    ordered = np.sort(finite)
    with np.errstate(over="ignore"):
        leaps = ordered[1:][ordered[1:] >= APART * np.maximum(ordered[:-1], 1.0)]
    groups = np.searchsorted(leaps, magnitude, side="right")
    return [groups == number for number in range(len(leaps) + 1)] if leaps.size else [...]


def largest_gap(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference where both are finite, 0 if they are nowhere."""
    a, b = wide(actual), wide(expected)
    both = np.isfinite(a) & np.isfinite(b)
    with np.errstate(over="ignore"):
        return float(np.abs(a[both] - b[both]).max()) if both.any() else 0.0


def same_specials(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Where NaN and infinities agree: both NaN, both the same infinity, or both finite."""
    a, b = wide(actual), wide(expected)
    return (np.isnan(a) == np.isnan(b)) & ((np.isinf(a) == np.isinf(b)) & (~np.isinf(a) | (a == b)))


def semantics_bound(
    torch32: np.ndarray, torch64: np.ndarray, scale: float | None = None, jittered64: Sequence[np.ndarray] = ()
) -> float:
    """The largest difference between two float64 runs that rounding explains.

    `64 (2^-29 max|t32 - t64| + 2^-53 scale)`: torch's own float32 noise, scaled down to
    float64, and the rounding of the result itself. Where values cancel (the gradient through
    a saturated softmax) float32 loses them whole and its noise says nothing; there torch's
    float64 noise, measured on jittered numbers, is added.

    Args:
        torch32: torch's result in float32, or any narrower dtype in which it runs.
        torch64: torch's result in float64 on the same parameters and inputs.
        scale: magnitude of the values; None takes the largest of `torch64`.
        jittered64: torch's results in float64 on numbers moved by at most half a float64 ulp.
    """
    scale = finite_scale(torch64) if scale is None else scale
    noise = min(largest_gap(torch32, torch64), scale if scale else np.inf)
    own = max((largest_gap(run, torch64) for run in jittered64), default=0.0)
    return SEMANTICS_FACTOR * (FLOAT32_TO_FLOAT64 * noise + UNIT["float64"] * scale + own)


@dataclass(frozen=True)
class Identity:
    """Agreement of two float64 arrays once each is rounded to float32.

    Attributes:
        elements: how many were compared.
        equal: how many are bit-equal.
        ties: how many differ by one float32 ulp because a rounding boundary lies between two
            float64 values that are closer than the bound.
        cancelled: how many differ by more ulp, but in float64 by less than the bound: so little
            is left of them after cancellation that float64 itself does not know their digits.
        unexplained: how many differ otherwise.
        ratio: largest float64 difference over the bound.
        bound: the largest difference that rounding explains.
        zero: all values of both sides are below the bound: zero in exact arithmetic.
    """

    elements: int
    equal: int
    ties: int
    cancelled: int
    unexplained: int
    ratio: float
    bound: float
    zero: bool = False

    @property
    def passed(self) -> bool:
        return self.unexplained == 0 and self.ratio <= 1


def identity(flax64: np.ndarray, torch64: np.ndarray, bound: float) -> tuple[Identity, np.ndarray]:
    """Compare two float64 results as float32 numbers.

    Args:
        flax64: Flax's result, any shape.
        torch64: torch's, same shape.
        bound: the largest difference that rounding explains, from `semantics_bound`.

    Returns:
        The figures, and where the difference is unexplained.
    """
    finite = np.isfinite(flax64) & np.isfinite(torch64)
    with np.errstate(over="ignore"):
        gap = np.abs(np.subtract(flax64, torch64, where=finite, out=np.zeros(flax64.shape)))
    special = same_specials(flax64, torch64)
    magnitude = max(finite_scale(flax64), finite_scale(torch64))
    if special.all() and np.isfinite(torch64).all() and 0 < magnitude <= bound:
        return Identity(flax64.size, flax64.size, 0, 0, 0, float(gap.max(initial=0) / bound), bound, zero=True), ~special
    with np.errstate(over="ignore", under="ignore"):
        flax32, torch32 = flax64.astype(np.float32), torch64.astype(np.float32)
    equal = same_bits(flax32, torch32)
    # Rounded apart, so a boundary of float32 lies between the two values; both are within
    # `gap` of it. If that is no more than rounding explains, the difference proves nothing.
    excused = ~equal & special & (gap <= bound)
    near = np.zeros(equal.shape, bool)
    near[excused] = ulp_distance(flax32[excused], torch32[excused]) <= 1
    unexplained = ~equal & ~excused
    ratio = float(gap.max(initial=0.0) / bound) if bound else (0.0 if not gap.any() else np.inf)
    if not special.all():
        ratio = np.inf
    counts = (int(equal.sum()), int(near.sum()), int((excused & ~near).sum()), int(unexplained.sum()))
    return Identity(flax64.size, *counts, ratio, bound), unexplained


def worst_part(flax64: np.ndarray, torch64: np.ndarray, bound: Callable[[Any], float]) -> tuple[Identity, np.ndarray]:
    """Compare two float64 results, values far apart in magnitude apart from each other.

    Args:
        flax64: Flax's result, any shape.
        torch64: torch's, same shape.
        bound: the largest difference that rounding explains at indices such as `alike` gives.

    Returns:
        The figures of the worst part, and where it lies.
    """
    parts = alike(torch64)
    results = [identity(flax64[part], torch64[part], bound(part))[0] for part in parts]
    worst = max(range(len(parts)), key=lambda number: results[number].ratio)
    where = np.zeros(torch64.shape, bool)
    where[parts[worst]] = True
    return results[worst], where


@dataclass(frozen=True)
class Precision:
    """Flax's error in a deployed dtype against torch's own, both from the float64 oracle.

    Attributes:
        max_ratio: Flax's largest error over the allowed one.
        rms_ratio: Flax's root mean square error over the allowed one.
        max_error: Flax's largest error.
        torch_error: the largest error of torch's ensemble.
    """

    max_ratio: float
    rms_ratio: float
    max_error: float
    torch_error: float

    @property
    def passed(self) -> bool:
        return self.max_ratio <= 1 and self.rms_ratio <= 1


# Factor on the ensemble's largest error and floor in u * scale, then the same two for the root
# mean square. float32: 2,016 clean trials. Half precision, with benchmarks/calibrate_native.py
# (torch 2.13, jax 0.10, CPU): the mirror needs a factor of 1.0, a port with stock nnx.Linear and
# jax.nn.softmax, which round twice, up to 2.0. float64: twice float32's, because there the oracle
# makes the same roundings as what it judges.
PRECISION_RULE = {
    "float64": (8.0, 2.0, 6.0, 0.5),
    "float32": (4.0, 1.0, 3.0, 0.25),
    "bfloat16": (3.0, 0.5, 3.0, 0.25),
    "float16": (3.0, 0.5, 3.0, 0.25),
}
# Of runs that round at every elementary operation; the same in half precision as in float32: among the gradients of
# clean pairs the largest error was 3.5 times that of sixteen such runs (benchmarks/clean_trials.py, bfloat16).
ELEMENTARY_RULE = PRECISION_RULE | dict.fromkeys(("bfloat16", "float16"), (4.0, 1.0, 3.0, 0.25))


# The mean square of so few numbers is that of their largest, and has its spread.
FEW = 16


def precision(
    flax: np.ndarray,
    ensemble: list[np.ndarray],
    oracle: np.ndarray,
    dtype: str,
    scale: float | None = None,
    *,
    last: bool = False,
) -> Precision:
    """Whether Flax is as precise as torch in a dtype.

    `max err <= 4 max_ens + u scale` and `rms err <= 3 rms_ens + u scale / 4`, where `ens` is
    torch run on inputs and weights jittered by at most half an ulp. Values far apart in magnitude are judged apart, as
    `alike` says, where no magnitude is given.

    Args:
        flax: Flax's result in the dtype.
        ensemble: torch's results in the dtype, the unjittered run first.
        oracle: torch's result in float64 on the same numbers.
        dtype: in which both ran.
        scale: magnitude of the values; None takes the largest of the oracle.
        last: whether the ensemble has runs that round at every elementary operation.
    """
    parts = alike(oracle) if scale is None else [...]
    rule = (ELEMENTARY_RULE if last else PRECISION_RULE)[dtype]
    found = [precision_of_part(flax[part], [run[part] for run in ensemble], oracle[part], dtype, rule, scale) for part in parts]
    return max(found, key=lambda result: max(result.max_ratio, result.rms_ratio))


def precision_of_part(
    flax: np.ndarray,
    ensemble: list[np.ndarray],
    oracle: np.ndarray,
    dtype: str,
    rule: tuple[float, float, float, float],
    scale: float | None,
) -> Precision:
    """`precision` of values that one magnitude judges."""
    scale = finite_scale(oracle) if scale is None else scale
    valid = np.isfinite(oracle)
    for run in [flax, *ensemble]:
        valid &= np.isfinite(wide(run))
    if not valid.any():
        return Precision(0.0, 0.0, 0.0, 0.0)
    k_max, floor_max, k_rms, floor_rms = rule
    if valid.sum() < FEW:
        k_rms, floor_rms = k_max, floor_max
    errors = [wide(run)[valid] - oracle[valid] for run in ensemble]
    mine = wide(flax)[valid] - oracle[valid]
    worst = max(float(np.abs(e).max()) for e in errors)
    # Denormals: XLA flushes them to zero on the CPU, in float32's range each term of a sum by itself; torch keeps them.
    tiny = float(ml_dtypes.finfo(numpy_float(dtype)).tiny) * (FLUSHED if dtype in ("float32", "bfloat16") else 1)
    allowed_max = k_max * worst + floor_max * UNIT[dtype] * scale + tiny
    allowed_rms = k_rms * max(rms(e) for e in errors) + floor_rms * UNIT[dtype] * scale + tiny
    return Precision(float(np.abs(mine).max()) / allowed_max, rms(mine) / allowed_rms, float(np.abs(mine).max()), worst)


def rms(errors: np.ndarray) -> float:
    # Squares of what is near the end of the range would overflow.
    largest = float(np.abs(errors).max(initial=0.0))
    return largest * float(np.sqrt(np.mean(np.square(errors / largest)))) if largest else 0.0


def numpy_float(dtype: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, dtype) if hasattr(ml_dtypes, dtype) else dtype)


def jittered(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A float array with every value moved by at most half an ulp before it is rounded again."""
    unit = UNIT[str(array.dtype)]
    moved = wide(array) * (1 + unit * rng.uniform(-1, 1, array.shape))
    # Of an array without axes NumPy makes a scalar, which would not count as an array.
    return np.asarray(moved.astype(array.dtype))


def significant_bits(array: np.ndarray) -> tuple[float, float]:
    """The largest magnitude of a float64 array, and its quantum.

    Returns:
        The largest finite magnitude, and the largest power of two of which every finite value
        is a multiple; (0, inf) if all are zero.
    """
    values = np.abs(array[np.isfinite(array)])
    values = values[values != 0]
    if not values.size:
        return 0.0, float("inf")
    mantissa, exponent = np.frexp(values)
    digits = (mantissa * 2.0**53).astype(np.int64)
    trailing = np.log2((digits & -digits).astype(np.float64))
    return float(values.max()), float(2.0 ** float((exponent - 53 + trailing).min()))
