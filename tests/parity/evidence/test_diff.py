import json
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import parity

F32, BF16 = np.float32, ml_dtypes.bfloat16


class Output(NamedTuple):
    logits: object
    states: object


def only(actual, expected, tolerance=None):
    """The one leaf of a diff."""
    result = parity.diff(actual, expected, tolerance)
    (leaf,) = result.leaves
    assert result.passed == leaf.agrees
    return leaf


# --------------------------------------------------------------- structure before numbers


@pytest.mark.parametrize(
    ("actual", "expected", "says"),
    [
        (np.zeros((3, 1)), np.zeros(3), r"shape \(3, 1\), expected \(3,\)"),
        (np.zeros(3), np.zeros((3, 1)), r"shape \(3,\), expected \(3, 1\)"),
        (np.zeros(()), np.zeros(1), r"shape \(\), expected \(1,\)"),
        (np.zeros((0, 2)), np.zeros((0, 3)), r"shape \(0, 2\), expected \(0, 3\)"),
        (np.zeros(3), np.zeros(3, F32), "dtype float64, expected float32"),
        (np.zeros(3, np.int32), np.zeros(3, np.int64), "dtype int32, expected int64"),
        (np.zeros(3, bool), np.zeros(3, np.uint8), "dtype bool, expected uint8"),
        (np.zeros(3, BF16), np.zeros(3, np.float16), "dtype bfloat16, expected float16"),
    ],
)
def test_shape_and_dtype_are_never_forgiven(actual, expected, says):
    result = parity.diff(actual, expected, {"atol": 1e9, "rtol": 1e9, "scaled": 1e9})
    assert not result.passed
    with pytest.raises(parity.DivergenceError, match=says):
        result.raise_for_divergence()


def test_leaves_that_only_one_side_has_are_named():
    result = parity.diff({"a": np.zeros(1), "c": [np.zeros(1)]}, {"a": np.zeros(1), "b": np.zeros(1)})
    assert {leaf.path: leaf.reason for leaf in result.leaves} == {
        "['a']": "",
        "['b']": "only expected has it",
        "['c'][0]": "only actual has it",
    }
    assert not result.passed


def test_every_leaf_of_a_nested_tree_has_its_path():
    tree = {"x": (np.ones(2), [np.ones(3), {"y": np.ones(4)}]), 1: Output(np.ones(5), ())}
    paths = ["['x'][0]", "['x'][1][0]", "['x'][1][1]['y']", "[1].logits"]
    assert [leaf.path for leaf in parity.diff(tree, tree).leaves] == paths
    wrong = {"x": (np.ones(2), [np.ones(3), {"y": np.array([1, 1, 5.0, 1])}]), 1: Output(np.ones(5), ())}
    (leaf,) = [leaf for leaf in parity.diff(wrong, tree).leaves if not leaf.agrees]
    assert (leaf.path, leaf.worst, leaf.actual, leaf.expected) == (paths[2], (2,), 5.0, 1.0)


# --------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("actual", "expected", "agrees"),
    [
        ([np.nan], [np.nan], True),
        ([np.nan], [1.0], False),
        ([1.0], [np.nan], False),
        ([np.inf], [np.inf], True),
        ([-np.inf], [np.inf], False),
        ([np.inf], [np.nan], False),
        ([np.inf], [3e38], False),
        ([0.0], [-0.0], True),
    ],
)
@pytest.mark.parametrize("dtype", [np.float64, F32, BF16, np.complex64])
@pytest.mark.parametrize("tolerance", [None, {"atol": 1e300}])
def test_nan_and_infinities_are_no_question_of_tolerance(actual, expected, agrees, dtype, tolerance):
    leaf = only(np.array([2.0, *actual]).astype(dtype), np.array([2.0, *expected]).astype(dtype), tolerance)
    assert leaf.agrees == agrees
    if not agrees:
        assert (leaf.reason, leaf.worst, leaf.differing) == ("NaN or infinity on one side only", (1,), 1)
        assert leaf.atol is None


def test_a_flipped_sign_is_the_worst_place_whatever_the_mean_says():
    expected = np.arange(12.0).reshape(3, 4)
    actual = expected.copy()
    actual[2, 1] *= -1
    leaf = only(actual, expected)
    assert (leaf.worst, leaf.actual, leaf.expected, leaf.difference, leaf.atol) == ((2, 1), -9.0, 9.0, 18.0, 18.0)
    assert (leaf.differing, leaf.elements) == (1, 12)


@pytest.mark.parametrize(
    ("actual", "expected", "difference"),
    [
        (np.array([2**63 - 1]), np.array([-(2**63)]), 2.0**64),
        (np.array([0], np.uint64), np.array([2**64 - 1], np.uint64), 2.0**64),
        (np.array([2**60 + 1]), np.array([2**60]), 1.0),
        (np.array([200], np.uint8), np.array([201], np.uint8), 1.0),
        (np.array([True]), np.array([False]), 1.0),
    ],
)
def test_whole_numbers_and_booleans_must_be_equal_whatever_the_tolerance(actual, expected, difference):
    leaf = only(actual, expected, {"atol": 1e30, "scaled": 1.0})
    assert not leaf.agrees
    assert leaf.difference == difference
    assert leaf.atol is None, "no tolerance would have passed"
    assert only(expected, expected.copy()).agrees


def test_complex_numbers_are_apart_by_the_modulus():
    expected = np.array([1 + 1j, 2 - 1j], np.complex64)
    actual = expected + np.array([0, 3 + 4j], np.complex64)
    leaf = only(actual, expected)
    assert (leaf.worst, leaf.difference, leaf.atol, leaf.differing) == ((1,), 5.0, 5.0, 1)
    assert leaf.actual == 5 + 3j
    assert only(actual, expected, {"atol": 5.0}).agrees
    assert not only(actual, expected, {"atol": np.nextafter(5.0, 0)}).agrees
    assert only(actual, expected, {"atol": 5.0}).difference == 5.0
    assert not only(np.array([1 + 2j]), np.array([1 + 1j])).agrees


def test_half_precision_is_compared_bit_for_bit_and_counted_in_its_own_ulp():
    expected = np.array([1.0, -3.0], BF16)
    actual = np.array([1.0, -3.015625], BF16)
    leaf = only(actual, expected)
    assert (leaf.ulp, leaf.difference, leaf.worst) == (1, 2.0**-6, (1,))
    # u of bfloat16 is 2^-8, the scale is 3.
    assert leaf.scaled == pytest.approx(2.0**-6 / (2.0**-8 * 3))


def test_a_lone_number_and_an_array_without_axes():
    assert only(3, 3).agrees
    assert only(np.float32(1.5), np.float32(1.5)).agrees
    leaf = only(np.array(2.0), np.array(1.0))
    assert (leaf.worst, leaf.actual, leaf.path) == ((), 2.0, "")


def test_empty_arrays_agree():
    leaf = only(np.zeros((0, 3)), np.zeros((0, 3)))
    assert leaf.agrees and leaf.elements == 0


def test_the_widest_numbers_do_not_overflow():
    largest = np.finfo(np.float64).max
    leaf = only(np.array([largest]), np.array([-largest]))
    assert leaf.difference == np.inf
    assert not only(np.array([largest]), np.array([-largest]), {"atol": largest}).agrees


# --------------------------------------------------------------- tolerances


@pytest.mark.parametrize("kind", ["atol", "rtol", "scaled"])
def test_a_tolerance_allows_exactly_what_it_says(kind):
    expected = np.array([4.0, 8.0])
    actual = expected + np.array([1.0, 0.0])
    exact = {"atol": 1.0, "rtol": 0.25, "scaled": 0.125}[kind]
    assert only(actual, expected, {kind: exact}).agrees
    leaf = only(actual, expected, {kind: np.nextafter(exact, 0)})
    assert not leaf.agrees
    assert leaf.differing == 1


def test_a_number_is_relative_to_the_largest_expected_value_of_each_leaf():
    expected = [np.array([100.0, 0.0]), np.array([1.0, 0.0])]
    actual = [np.array([100.0, 1.0]), np.array([1.0, 1.0])]
    assert [leaf.agrees for leaf in parity.diff(actual, expected, 0.01).leaves] == [True, False]


def test_tolerances_add_up():
    expected, actual = np.array([4.0, 8.0]), np.array([5.75, 8.0])
    assert only(actual, expected, {"atol": 0.25, "rtol": 0.125, "scaled": 0.125}).agrees
    assert not only(actual, expected, {"atol": 0.2, "rtol": 0.125, "scaled": 0.125}).agrees


@given(
    st.lists(st.tuples(*[st.floats(-(2.0**99), 2.0**99, width=32)] * 2), min_size=1, max_size=20),
    st.sampled_from([np.float64, np.float32, BF16]),
)
@settings(max_examples=200, deadline=None)
def test_the_smallest_atol_passes_and_the_next_smaller_number_does_not(pairs, dtype):
    actual, expected = (np.array(side).astype(dtype) for side in zip(*pairs, strict=True))
    leaf = only(actual, expected)
    if leaf.agrees:
        assert (actual == expected).all()
        return
    assert only(actual, expected, {"atol": leaf.atol}).agrees
    assert not only(actual, expected, {"atol": np.nextafter(leaf.atol, 0)}).agrees


# --------------------------------------------------------------- frameworks


def test_torch_jax_and_numpy_hold_the_same_numbers():
    values = np.array([[1.5, -2.0], [np.nan, np.inf]], F32)
    tensor = torch.from_numpy(values.copy()).requires_grad_()
    for actual in (tensor, tensor.T.contiguous().T, jnp.asarray(values), values):
        for expected in (tensor, jnp.asarray(values), values):
            assert parity.diff([actual], [expected]).passed
    assert parity.diff(tensor.detach().bfloat16(), jnp.asarray(values, jnp.bfloat16)).passed
    assert not parity.diff(tensor, jnp.asarray(values).at[0, 1].set(2.0)).passed


# --------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    "tolerance",
    [-1.0, float("nan"), {"atol": -1}, {"atol": float("nan")}, {"tol": 1e-3}, {"atol": "1e-3"}, "1e-3", {"atol": None}, [1e-3]],
)
def test_a_tolerance_that_means_nothing_is_refused(tolerance):
    with pytest.raises(parity.InputError, match="tolerance takes atol, rtol and scaled, each at least 0"):
        parity.diff(np.ones(1), np.ones(1), tolerance)


@pytest.mark.parametrize(
    ("leaf", "says"),
    [
        ("text", "str"),
        (None, "NoneType"),
        (object(), "object"),
        (np.array(["a"]), "ndarray"),
        (torch.empty(2, device="meta"), "meta device"),
        (torch.eye(2).to_sparse(), "dense"),
    ],
)
def test_a_leaf_that_is_no_array_is_refused_with_its_path(leaf, says):
    with pytest.raises(parity.InputError, match=rf"(?s)\['x'\]\[0\].*{says}"):
        parity.diff({"x": [leaf]}, {"x": [leaf]})


# --------------------------------------------------------------- words


def test_agreement_is_one_line_and_data_are_plain():
    result = parity.diff([np.ones(2), np.ones(3)], [np.ones(2), np.ones(3)])
    assert str(result) == "no difference: 2 arrays, 5 values"
    result.raise_for_divergence()
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["passed"] is True


def test_a_difference_names_the_leaf_the_place_both_values_and_the_tolerance():
    result = parity.diff({"a": np.array([1.0, 2.5]), "b": np.ones(2)}, {"a": np.array([1.0, 2.0]), "b": np.ones(2)})
    text = str(result)
    for part in ("1 of 2 arrays differ", "['a']", "worst at (1,)", "actual 2.5", "expected 2.0", "atol=0.5"):
        assert part in text
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert (data["passed"], data["leaves"][0]["worst"]) == (False, [1])


@pytest.mark.parametrize("value", [np.nan, np.inf, 1j, 2**63])
def test_data_hold_values_that_json_has_no_number_for(value):
    result = parity.diff(np.array([value]), np.zeros_like(np.array([value])))
    assert not result.passed
    json.dumps(result.to_dict(), allow_nan=False)
    assert str(result)
