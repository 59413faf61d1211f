"""How far apart two arrays are, and how far apart rounding alone can bring them. NumPy only."""

import math
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
# The mean square of so few numbers is that of their largest, and has its spread; their largest may be small by luck.
FEW = 16
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
    """The array in float64, itself if it is so already: only to be read."""
    return np.asarray(array).astype(np.float64, copy=False)


def comparable(actual: Any, expected: np.ndarray) -> TypeGuard[np.ndarray]:
    """Whether an output can be compared value by value: an array of the same shape, complex only if both are."""
    if not isinstance(actual, np.ndarray) or actual.shape != expected.shape:
        return False
    return (actual.dtype.kind == "c") == (expected.dtype.kind == "c")


def finite_scale(array: np.ndarray) -> float:
    """Largest finite magnitude, 0 if there is none."""
    values = np.abs(wide(array))
    # NaN and infinity go through a maximum, so that only arrays that hold one are looked through.
    largest = float(values.max(initial=0.0))
    if np.isfinite(largest):
        return largest
    values = values[np.isfinite(values)]
    return float(values.max()) if values.size else 0.0


def alike(array: np.ndarray) -> list[Any]:
    """Indices of the values that can be judged by one magnitude.

    A hidden score of -1e20 says nothing of how exact the others are: where magnitudes in order
    leap by `APART` or more, to `APART` or more, what lies above is apart from what lies below.
    Small values stay with larger ones: a softmax weight of 1e-60 is as exact as its scores were.
    """
    magnitude = np.abs(array)
    if magnitude.max(initial=0.0) < APART:
        return [...]
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
    with np.errstate(over="ignore", invalid="ignore"):
        largest = float(np.abs(a - b).max(initial=0.0))
    if np.isfinite(largest):
        return largest
    both = np.isfinite(a) & np.isfinite(b)
    with np.errstate(over="ignore"):
        return float(np.abs(a[both] - b[both]).max()) if both.any() else 0.0


def same_specials(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Where NaN and infinities agree: both NaN, both the same infinity, or both finite."""
    a, b = wide(actual), wide(expected)
    if a.shape == b.shape and np.isfinite(a).all() and np.isfinite(b).all():
        return np.ones(a.shape, bool)
    return (np.isnan(a) == np.isnan(b)) & ((np.isinf(a) == np.isinf(b)) & (~np.isinf(a) | (a == b)))


def semantics_bound(torch32: np.ndarray, torch64: np.ndarray, scale: float | None = None, own: float = 0.0) -> float:
    """The largest difference between two float64 runs that rounding explains.

    `64 (2^-29 max|t32 - t64| + 2^-53 scale)`: torch's own float32 noise, scaled down to
    float64, and the rounding of the result itself. Where values cancel (the gradient through
    a saturated softmax) float32 loses them whole and its noise says nothing; there torch's
    float64 noise, measured on jittered numbers, is added.

    Args:
        torch32: torch's result in float32, or any narrower dtype in which it runs.
        torch64: torch's result in float64 on the same parameters and inputs.
        scale: magnitude of the values; None takes the largest of `torch64`.
        own: largest difference from it of torch's results in float64 on numbers moved by at most half a float64 ulp.
    """
    return rounding(largest_gap(torch32, torch64), finite_scale(torch64) if scale is None else scale, own)


def rounding(noise: float, scale: float, own: float = 0.0) -> float:
    """`semantics_bound` of values of which torch's largest float32 noise and the magnitude are known."""
    noise = min(noise, scale if scale else np.inf)
    return SEMANTICS_FACTOR * (FLOAT32_TO_FLOAT64 * noise + UNIT["float64"] * scale + own)


def semantics_bounds(torch32: np.ndarray, torch64: np.ndarray, jittered64: Sequence[np.ndarray] = ()) -> np.ndarray:
    """`semantics_bound` for each value, by the noise and the magnitude of those beside which it is exact.

    Values far apart are judged apart, as `alike` says, and each row by itself: beside rows that are
    much larger a small one would be allowed their noise. A row is as many last axes as hold `FEW`
    values, for the noise of fewer may be small by luck; one that has fewer of a magnitude gets the bound of all.

    Args:
        torch32: as in `semantics_bound`.
        torch64: as in `semantics_bound`.
        jittered64: torch's results in float64 on numbers moved by at most half a float64 ulp.

    Returns:
        float64, in the shape of `torch64`.
    """
    found = np.zeros(torch64.shape)
    if not torch64.size:
        return found
    rows = rows_of(torch64.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        gaps = [np.abs(run - torch64) for run in (torch32, *jittered64)]
    for part in alike(torch64):
        chosen = np.ones(torch64.shape, bool) if part is ... else part

        def largest(magnitudes: np.ndarray, chosen: np.ndarray = chosen) -> np.ndarray:
            return np.where(chosen & np.isfinite(magnitudes), magnitudes, 0.0).reshape(rows, -1).max(1)

        scale, noise, *own = (largest(magnitudes) for magnitudes in (np.abs(torch64), *gaps))
        noise = np.minimum(noise, np.where(scale > 0, scale, np.inf))
        limits = SEMANTICS_FACTOR * (FLOAT32_TO_FLOAT64 * noise + UNIT["float64"] * scale + np.max(own, axis=0, initial=0.0))
        moved = max((largest_gap(run[chosen], torch64[chosen]) for run in jittered64), default=0.0)
        whole = semantics_bound(torch32[chosen], torch64[chosen], None, moved)
        enough = chosen.reshape(rows, -1).sum(1) >= FEW
        by_row = np.where(enough, np.minimum(limits, whole), whole)
        found += np.where(chosen.reshape(rows, -1), by_row[:, None], 0.0).reshape(torch64.shape)
    return found


def rows_of(shape: tuple[int, ...]) -> int:
    """How many rows of at least `FEW` values an array has that are its last axes; 1 if it has fewer values."""
    rows, held = math.prod(shape), 1
    for size in reversed(shape):
        if held >= FEW:
            break
        held, rows = held * size, rows // max(size, 1)
    return rows


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


@dataclass(frozen=True)
class Noise:
    """How far torch's own runs are from the float64 oracle, for each part of it that is judged by itself.

    Attributes:
        largest: the largest error of any run, by part.
        rms: the largest root mean square error of a run, by part.
        overflown: where a run is not finite although the oracle is; None if it is nowhere.
    """

    largest: tuple[float, ...]
    rms: tuple[float, ...]
    overflown: np.ndarray | None = None

    def joined(self, other: "Noise") -> "Noise":
        """That of the runs of both."""
        masks = [one.overflown for one in (self, other) if one.overflown is not None]
        return Noise(
            tuple(map(max, self.largest, other.largest)),
            tuple(map(max, self.rms, other.rms)),
            np.logical_or.reduce(masks) if masks else None,
        )


def noise_of(runs: Sequence[np.ndarray], oracle: np.ndarray, parts: Sequence[Any]) -> Noise:
    """How far runs are from the oracle.

    Args:
        runs: results in the deployed dtype.
        oracle: the result in float64, in the same shape.
        parts: indices of the values that are judged together, as `alike` gives them.
    """
    finite = np.isfinite(oracle)
    overflown = finite & ~np.logical_and.reduce([np.isfinite(wide(run)) for run in runs])
    valid = finite & ~overflown
    errors = [[wide(run)[part][valid[part]] - oracle[part][valid[part]] for run in runs] for part in parts]
    return Noise(
        tuple(max(float(np.abs(e).max(initial=0.0)) for e in of_part) for of_part in errors),
        tuple(max(rms(e) for e in of_part) for of_part in errors),
        overflown if overflown.any() else None,
    )


def precision(
    flax: np.ndarray,
    ensemble: list[np.ndarray] | Noise,
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
        ensemble: torch's results in the dtype; or how far they are from the oracle, by the parts that are judged here.
        oracle: torch's result in float64 on the same numbers.
        dtype: in which both ran.
        scale: magnitude of the values; None takes the largest of the oracle.
        last: whether the ensemble has runs that round at every elementary operation.
    """
    parts = alike(oracle) if scale is None else [...]
    rule = (ELEMENTARY_RULE if last else PRECISION_RULE)[dtype]
    noise = ensemble if isinstance(ensemble, Noise) else noise_of(ensemble, oracle, parts)
    shown = np.isfinite(oracle) & np.isfinite(wide(flax))
    shown = shown if noise.overflown is None else shown & ~noise.overflown
    found = []
    for number, part in enumerate(parts):
        errors = wide(flax)[part][shown[part]] - oracle[part][shown[part]]
        magnitude = finite_scale(oracle[part]) if scale is None else scale
        found.append(precision_of_part(errors, noise.largest[number], noise.rms[number], dtype, rule, magnitude))
    return max(found, key=lambda result: max(result.max_ratio, result.rms_ratio))


def precision_of_part(
    mine: np.ndarray, worst: float, worst_rms: float, dtype: str, rule: tuple[float, float, float, float], scale: float
) -> Precision:
    """`precision` of values that one magnitude judges, by their errors and torch's."""
    if not mine.size:
        return Precision(0.0, 0.0, 0.0, 0.0)
    k_max, floor_max, k_rms, floor_rms = rule
    if mine.size < FEW:
        k_rms, floor_rms = k_max, floor_max
    # Denormals: XLA flushes them to zero on the CPU, in float32's range each term of a sum by itself; torch keeps them.
    tiny = float(ml_dtypes.finfo(numpy_float(dtype)).tiny) * (FLUSHED if dtype in ("float32", "bfloat16") else 1)
    allowed_max = k_max * worst + floor_max * UNIT[dtype] * scale + tiny
    allowed_rms = k_rms * worst_rms + floor_rms * UNIT[dtype] * scale + tiny
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
