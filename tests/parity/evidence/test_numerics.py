import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.evidence.numerics import (
    PRECISION_RULE,
    UNIT,
    finite_scale,
    identity,
    jittered,
    largest_gap,
    neighbours,
    numpy_float,
    precision,
    same_bits,
    same_specials,
    semantics_bound,
    significant_bits,
    ulp_distance,
)

DTYPES = tuple(UNIT)


def rank(value) -> int:
    """The place of a float among all floats of its dtype, counted from zero; slow, from sign and magnitude."""
    width = value.dtype.itemsize * 8
    bits = int(np.array([value]).view(f"u{value.dtype.itemsize}")[0])
    sign, magnitude = divmod(bits, 2 ** (width - 1))
    return -magnitude if sign else magnitude


def floats_of(dtype: str):
    """Any finite float of a dtype, by its bits, so that tiny and huge ones are as likely as others."""
    width = numpy_float(dtype).itemsize

    def value(bits: int):
        return np.array([bits], f"u{width}").view(numpy_float(dtype))[0]

    return st.integers(0, 2 ** (8 * width) - 1).map(value).filter(lambda v: bool(np.isfinite(v)))


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_ulp_distance_counts_as_a_slow_count_does(dtype, data):
    a, b = data.draw(floats_of(dtype)), data.draw(floats_of(dtype))
    expected = min(abs(rank(a) - rank(b)), 2**63 - 1)
    assert ulp_distance(np.array([a]), np.array([b])).tolist() == [expected]


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_ulp_distance_counts_the_steps_to_a_neighbour(dtype, data):
    a = np.array([data.draw(floats_of(dtype))])
    steps = data.draw(st.integers(-1000, 1000))
    moved = neighbours(a, steps)
    with np.errstate(invalid="ignore"):
        # Past the last number of bfloat16 come signalling NaNs.
        finite = np.isfinite(moved).all()
    if finite:
        assert ulp_distance(a, moved).tolist() == [abs(steps)]
        assert np.sign(float(moved[0]) - float(a[0])) == np.sign(steps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_distance_goes_across_zero(dtype):
    tiny = ml_dtypes.finfo(numpy_float(dtype)).smallest_subnormal
    a = np.array([-tiny, 0.0, -0.0, -tiny], numpy_float(dtype))
    b = np.array([tiny, -0.0, tiny, 0.0], numpy_float(dtype))
    assert ulp_distance(a, b).tolist() == [2, 0, 1, 1]


def test_ulp_distance_of_the_ends_is_cut_at_the_largest_int64():
    ends = np.finfo(np.float64).max
    assert ulp_distance(np.array([ends]), np.array([-ends])).tolist() == [2**63 - 1]


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (np.zeros(2), np.zeros(3), r"equal shapes and dtypes, got \(2,\) float64 and \(3,\) float64"),
        (np.zeros(2), np.zeros(2, np.float32), "float64 and .* float32"),
        (np.array([np.nan]), np.zeros(1), "finite values"),
        (np.zeros(1), np.array([np.inf]), "finite values"),
    ],
)
def test_ulp_distance_refuses(a, b, says):
    with pytest.raises(ValueError, match=says):
        ulp_distance(a, b)


# --------------------------------------------------------------- equality


@pytest.mark.parametrize(
    ("a", "b", "same_number", "same_kind"),
    [
        (0.0, -0.0, True, True),
        (np.nan, np.nan, True, True),
        (np.nan, 1.0, False, False),
        (1.0, np.nan, False, False),
        (np.inf, np.inf, True, True),
        (np.inf, -np.inf, False, False),
        (np.inf, 3e38, False, False),
        (np.nan, np.inf, False, False),
        (1.0, 2.0, False, True),
    ],
)
def test_specials(a, b, same_number, same_kind):
    assert same_bits(np.float64(a), np.float64(b)) == same_number
    assert same_specials(np.array([a]), np.array([b])).tolist() == [same_kind]


def test_finite_scale_ignores_what_is_not_finite_and_may_be_zero():
    assert finite_scale(np.array([1.0, -3.0, np.nan, -np.inf])) == 3.0
    assert finite_scale(np.array([np.nan])) == finite_scale(np.zeros(0)) == 0.0


# --------------------------------------------------------------- identity


def boundary(rng: np.random.Generator, shape) -> np.ndarray:
    """Float64 values that lie exactly between two neighbouring float32 numbers."""
    low = rng.standard_normal(shape).astype(np.float32)
    return (low.astype(np.float64) + np.nextafter(low, np.float32(np.inf)).astype(np.float64)) / 2


def test_values_that_straddle_a_boundary_are_ties_if_closer_than_the_bound(seed):
    middle = boundary(np.random.default_rng(seed), 50)
    below, above = np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)
    assert (below.astype(np.float32) != above.astype(np.float32)).all()
    gap = float((above - below).max())
    result, wrong = identity(below, above, gap)
    assert (result.equal, result.ties, result.cancelled, result.unexplained, result.ratio) == (0, 50, 0, 0, 1.0)
    assert result.passed and not wrong.any()
    result, wrong = identity(below, above, np.nextafter(gap, 0))
    assert not result.passed and result.ratio > 1
    assert result.unexplained == (above - below == gap).sum() == wrong.sum() > 0


def test_equal_in_float32_but_apart_in_float64_does_not_pass(seed):
    torch64 = np.random.default_rng(seed).standard_normal(50).astype(np.float32).astype(np.float64)
    result, _ = identity(torch64 * (1 + 2.0**-40), torch64, 2.0**-50)
    assert result.equal == 50 and result.unexplained == 0
    assert not result.passed


def test_one_float32_ulp_beyond_the_bound_is_unexplained_at_its_place(seed):
    torch64 = np.random.default_rng(seed).standard_normal(50).astype(np.float32).astype(np.float64)
    flax64 = torch64.copy()
    flax64[7] = np.nextafter(np.float32(torch64[7]), np.float32(np.inf))
    result, wrong = identity(flax64, torch64, 1e-12)
    assert (result.equal, result.unexplained) == (49, 1)
    assert np.flatnonzero(wrong).tolist() == [7]


def test_values_below_the_bound_among_larger_ones_are_counted_as_cancelled():
    torch64, flax64 = np.array([1.0, 3e-16]), np.array([1.0, -2e-16])
    result, _ = identity(flax64, torch64, 1e-15)
    assert (result.equal, result.ties, result.cancelled, result.unexplained) == (1, 0, 1, 0)
    assert result.passed and not result.zero


def test_all_values_below_the_bound_are_zero_in_exact_arithmetic():
    result, _ = identity(np.array([3e-16, -1e-16]), np.array([-4e-16, 0.0]), 1e-15)
    assert result.zero and result.passed
    result, _ = identity(np.array([3e-16, -1e-16]), np.array([-4e-16, 0.0]), 1e-16)
    assert not result.zero and not result.passed


@pytest.mark.parametrize("torch64", [np.nan, np.inf, -np.inf, 1.0])
@pytest.mark.parametrize("flax64", [np.nan, np.inf, -np.inf, 1.0])
def test_nan_and_infinity_must_stand_on_both_sides(flax64, torch64):
    same = flax64 == torch64 or (np.isnan(flax64) and np.isnan(torch64))
    # A bound as large as this excuses any number, but no NaN.
    result, wrong = identity(np.array([2.0, flax64]), np.array([2.0, torch64]), 1e300)
    assert result.passed == same
    assert wrong.tolist() == [False, not same]


def test_exact_zeros_are_equal_without_a_bound():
    result, _ = identity(np.zeros(3), np.zeros(3), 0.0)
    assert result.passed and result.equal == 3 and result.ratio == 0
    assert not identity(np.array([1e-300]), np.zeros(1), 0.0)[0].passed


def test_identity_of_nothing_and_of_one_number():
    assert identity(np.zeros((0, 3)), np.zeros((0, 3)), 0.0)[0].passed
    assert identity(np.float64(2.0).reshape(()), np.float64(2.0).reshape(()), 0.0)[0].equal == 1


def test_identity_of_values_too_large_for_float32(seed):
    huge = np.random.default_rng(seed).standard_normal(20) * 1e300
    assert identity(huge, huge, 1.0)[0].passed
    assert not identity(-huge, huge, 1.0)[0].passed


# --------------------------------------------------------------- bounds


def test_semantics_bound_is_the_documented_formula():
    t64, t32 = np.array([1.0, -4.0]), np.array([1.0 + 2.0**-20, -4.0])
    assert semantics_bound(t32, t64) == 64 * (2.0**-29 * 2.0**-20 + 2.0**-53 * 4)
    assert semantics_bound(t32, t64, scale=8.0) == 64 * (2.0**-29 * 2.0**-20 + 2.0**-53 * 8)
    assert semantics_bound(t32, t64, own=2.0**-50) == 64 * (2.0**-49 + 2.0**-53 * 4 + 2.0**-50)


def test_semantics_bound_does_not_grow_with_nonsense_in_float32():
    t64 = np.array([1.0, 2.0])
    assert semantics_bound(np.array([1e30, np.nan]), t64) <= 64 * (2.0**-29 * 2 + 2.0**-53 * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_precision_passes_torchs_own_noise_and_fails_thrice_more_than_is_allowed(dtype, seed):
    rng = np.random.default_rng(seed)
    oracle = rng.standard_normal(1000)
    noise = UNIT[dtype] * rng.uniform(-1, 1, (6, 1000))

    ensemble = [oracle + noise[i] for i in range(5)]
    assert precision(oracle + noise[5], ensemble, oracle, dtype).passed
    k_max, floor_max, k_rms, floor_rms = (UNIT[dtype] * constant for constant in PRECISION_RULE[dtype])
    scale = np.abs(oracle).max()
    spike = oracle + noise[5]
    spike[17] += 3 * (k_max + floor_max * scale)
    result = precision(spike, ensemble, oracle, dtype)
    assert 2 < result.max_ratio < 4 and result.rms_ratio < 1 and not result.passed
    # Spread over all values an error shows in the mean square before any of them is too large.
    spread = precision(oracle + 1.2 * (0.6 * k_rms + floor_rms * scale) * np.sign(noise[5]), ensemble, oracle, dtype)
    assert spread.max_ratio < 1 < spread.rms_ratio and not spread.passed


def test_precision_ignores_what_is_not_finite_and_allows_flushed_denormals():
    oracle = np.array([np.nan, 1e-40])
    result = precision(np.array([np.nan, 0.0]), [np.array([np.nan, 1e-40])], oracle, "float32")
    assert result.passed
    assert precision(np.array([np.nan]), [np.array([np.nan])], np.array([np.nan]), "float32").passed


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_jitter_moves_by_at_most_half_an_ulp_before_rounding(dtype, data):
    value = numpy_float(dtype).type(data.draw(st.floats(2.0**-10, 2.0**10)) * data.draw(st.sampled_from((-1, 1))))
    array = np.full(64, value)
    moved = jittered(array, np.random.default_rng(data.draw(st.integers(0, 99))))
    assert moved.dtype == array.dtype
    largest = Fraction(float(value)) * Fraction(UNIT[dtype])
    for m in moved:
        # Half an ulp, and as much again by the rounding that follows.
        assert abs(Fraction(float(m)) - Fraction(float(value))) <= 2 * abs(largest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_jitter_moves_many_values_and_leaves_the_callers(dtype, seed):
    array = np.random.default_rng(seed).standard_normal(1000).astype(numpy_float(dtype))
    before = array.copy()
    moved = jittered(array, np.random.default_rng(seed))
    assert 0.02 < (moved != array).mean() < 0.98
    assert (array == before).all()


def test_the_largest_gap_is_the_largest_finite_difference():
    assert largest_gap(np.array([1.0, np.nan, 5.0]), np.array([1.5, np.nan, 5.0])) == 0.5


@given(st.lists(st.tuples(st.integers(-(2**20), 2**20), st.integers(-40, 40)), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_significant_bits_finds_the_largest_common_power_of_two(pairs):
    values = [Fraction(number) * Fraction(2) ** exponent for number, exponent in pairs]
    largest, quantum = significant_bits(np.array([float(v) for v in values]))
    nonzero = [v for v in values if v]
    if not nonzero:
        assert (largest, quantum) == (0.0, math.inf)
        return
    assert largest == float(max(map(abs, nonzero)))
    assert all((v / Fraction(quantum)).denominator == 1 for v in nonzero)
    assert any((v / Fraction(2 * quantum)).denominator != 1 for v in nonzero)


def test_significant_bits_ignores_what_is_not_finite():
    assert significant_bits(np.array([np.nan, np.inf, 6.0, 0.0])) == (6.0, 2.0)
