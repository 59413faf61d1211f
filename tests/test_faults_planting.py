"""Mutants of Flax models, and what is counted of a comparison that is refused."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.faults import measuring, mutants
from benchmarks.faults.causes import wanted
from benchmarks.faults.planting import Fault, Model
from parity.errors import InputError

X = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)


class Inner(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(6, 6, rngs=rngs), nnx.LayerNorm(6, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(self.first(x))
        return (x + y) / (2 + 0 * y) + 0 * x


class Outer(nnx.Module):
    def __init__(self):
        self.inner = Inner(nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)[:, 1:].mean(1)


def test_every_place_that_can_be_mutated_is_listed_and_put_back():
    model = Outer()
    right, kinds = np.asarray(model(X)), {}
    for one in mutants.candidates(model):
        undo = one.plant(mutants.module_at(model, one.place))
        kinds.setdefault(one.place, set()).add(mutants.sort(one))
        undo()
        assert np.array_equal(model(X), right), one
        assert wanted(one.kind), f"no cause is written down for {one.kind}"
    assert kinds["inner.first"] == {"mutated bias missing", "mutated kernel"}
    assert kinds["inner.norm"] == {"mutated bias missing", "mutated epsilon", "mutated scale left at one"}
    assert {"mutated term left out", "mutated product for quotient", "mutated module left out"} <= kinds["inner"]


def test_those_that_change_nothing_are_not_drawn_and_the_draw_is_the_same():
    known = {"", "inner", "inner.first", "inner.norm"}
    draws = [mutants.drawn(Outer(), (X,), known, seed) for seed in (1, 1, 2, 3, 4)]
    named = [[(one.place, one.kind) for one in draw] for draw in draws]
    assert named[0] == named[1] and len({str(one) for one in named}) > 1
    assert all(len({kind.partition(":")[0] for _, kind in one}) == mutants.DRAWN for one in named)
    same = (": 0 * x to 0", "scale left at one: the layer's")
    assert not any(kind.endswith(same) for one in named for _, kind in one)


REFUSED = "the first module that differs between two runs is blocks_1.drop (flax.linen.Dropout); where dropout is called"


@pytest.mark.parametrize(
    ("place", "text", "code", "exact", "cause"),
    [
        ("blocks.1.drop", REFUSED, "not repeatable", True, True),
        ("blocks.0.drop", REFUSED, "not repeatable", False, True),
        ("blocks.1.drop", "input 0 is of another dtype", "", False, False),
    ],
)
def test_a_refusal_is_counted_by_what_it_says(place, text, code, exact, cause):
    fault = Fault(place, "dropout left on")
    row = measuring.refusal(Model("m", None, None, None), fault, 0, InputError(text, code))
    assert (row["found"], row["exact"], row["cause"], row["refused"]) == (True, exact, cause, text)
