"""A module run alone is judged row by row and magnitude by magnitude: what is huge hides nothing that is small."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from evidence_pairs import normal
from fault_pairs import held

import parity
from parity.evidence.numerics import FEW, SEMANTICS_FACTOR, UNIT, rows_of, semantics_bound, semantics_bounds

HIDDEN = -1e20
ROWS = normal(3, 2, 20) * np.float32([1e9, 1.0, 1e-3])[:, None, None]
SHOWN = np.tril(np.ones((5, 7), bool))


def torch_scores(q, k):
    return (q @ k.transpose(-1, -2)).masked_fill(~torch.from_numpy(SHOWN), HIDDEN)


def flax_scores(fault=0.0):
    return lambda q, k: jnp.where(SHOWN, (q @ k.swapaxes(-1, -2)) * (1 + fault), HIDDEN)


def torch_square(x):
    return x * x.sigmoid()


def flax_square(fault=0.0):
    return lambda x: x / (1 + jnp.exp(-x)) * jnp.array([1.0, 1.0 + fault, 1.0])[:, None, None]


PAIRS = {
    "beside hidden scores": (torch_scores, flax_scores, (normal(3, 5, 4), normal(3, 7, 4, name="k"))),
    "beside larger rows": (torch_square, flax_square, (ROWS,)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_fault_in_small_values_is_seen_beside_huge_ones(name):
    ours, theirs, inputs = PAIRS[name]
    found = parity.trace(*held(ours, theirs(1e-9), name), *inputs).isolated()
    (fault,) = found.faults
    (difference,) = fault.differences
    assert (fault.path, difference.reason) == ("core", ""), str(found)
    # What is shown as the worst is one of those that differ, not the rounding of a huge one.
    assert difference.ratio > 100 and abs(difference.torch) < 1e3 and difference.difference < 1e-4, str(found)


@pytest.mark.parametrize("name", PAIRS)
def test_rounding_of_either_is_none(name):
    ours, theirs, inputs = PAIRS[name]
    assert parity.trace(*held(ours, theirs(), name), *inputs).isolated().passed


def test_rows_hold_enough_values_for_their_noise_to_be_known():
    assert [rows_of(shape) for shape in ((3, 2, 20), (3, 5, 4), (3, 2, 7), (2, 3), (), (4, 0))] == [6, 3, 1, 1, 1, 0]
    assert FEW == 16


def test_each_value_is_allowed_the_noise_of_its_row_and_magnitude():
    wide = ROWS.astype(np.float64)
    limits = semantics_bounds(wide, wide)
    assert limits.shape == wide.shape and (limits <= semantics_bound(wide, wide)).all()
    own = SEMANTICS_FACTOR * UNIT["float64"] * np.abs(wide).max(-1, keepdims=True)
    np.testing.assert_allclose(limits, np.broadcast_to(own, wide.shape), rtol=1e-12)
    hidden = np.where(SHOWN, normal(5, 7).astype(np.float64), HIDDEN)
    limits = semantics_bounds(hidden, hidden)
    assert limits[SHOWN].max() < 1e-12
    assert limits[~SHOWN].min() > 1e5


def test_a_row_in_which_torch_does_not_round_is_allowed_what_shaken_runs_show():
    exact, shaken = np.zeros((3, 16)), np.full((3, 16), 1e-17)
    exact[0] = 1.0
    assert semantics_bounds(exact, exact)[1:].max() == 0
    assert semantics_bounds(exact, exact, [shaken + exact])[1:].min() == pytest.approx(SEMANTICS_FACTOR * 1e-17)
    assert semantics_bounds(np.zeros((0, 3)), np.zeros((0, 3))).shape == (0, 3)
