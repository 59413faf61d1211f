"""Whether random keys can reach what a Flax model returns, told by its program alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import parity
from parity.evidence import repeatability
from parity.evidence.calls import Call
from parity.frameworks import load

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


class Dropping(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense, self.dropout = nnx.Linear(3, 5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.dense(x))


class Drawing(Dropping):
    """Draws, and throws away what it drew."""

    def __call__(self, x: jax.Array) -> jax.Array:
        jax.random.normal(self.dropout.rngs(), x.shape)
        return self.dense(x)


class ByValue(Dropping):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x) if float(x.sum()) > 0 else x


class Telling(Dropping):
    def __call__(self, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda key: None, jax.random.key_data(self.dropout.rngs()))
        return self.dense(x)


class Compiled(Dropping):
    """A program of its own inside counts as using whatever it takes."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.jit(lambda key, x: x * 2)(self.dropout.rngs(), self.dense(x))


CASES = [(Dropping, True, False), (Dropping, False, True), (Drawing, True, False), (ByValue, True, True)]
CASES += [(Telling, True, True), (Compiled, True, True)]


@pytest.mark.parametrize(("kind", "evaluating", "reached"), CASES)
def test_of_an_nnx_model(kind: type[Dropping], evaluating: bool, reached: bool) -> None:
    model = kind(nnx.Rngs(0))
    if evaluating:
        model.eval()
    before = jax.tree.map(np.asarray, jax.random.key_data(model.dropout.rngs.key[...]))
    assert load("nnx").reached_by_keys(model, Call((X,), {}, frozenset(["args[0]"]))) is reached
    np.testing.assert_array_equal(jax.random.key_data(model.dropout.rngs.key[...]), before)


class LinenDropping(linen.Module):
    training: bool

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dropout(0.5, deterministic=not self.training)(linen.Dense(5)(x))


@pytest.mark.parametrize("training", [True, False])
def test_of_a_linen_model(training: bool) -> None:
    module = LinenDropping(training)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    model = parity.Linen(module, module.init(keys, jnp.asarray(X)), rngs={"dropout": keys["dropout"]})
    assert load("linen").reached_by_keys(model, Call((X,), {}, frozenset(["args[0]"]))) is training


def test_a_model_whose_keys_reach_nothing_is_not_run_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    room, runs = load("nnx"), []
    evaluate = room.evaluate
    monkeypatch.setattr(room, "evaluate", lambda *args, **options: runs.append(options) or evaluate(*args, **options))
    model = Dropping(nnx.Rngs(0))
    call = Call((X,), {}, frozenset(["args[0]"]))
    with pytest.raises(parity.InputError, match="other numbers with other random keys"):
        repeatability.refuse_flax(room, model, call, reseed=True)
    assert len(runs) == 2
    model.eval()
    repeatability.refuse_flax(room, model, call, reseed=True)
    assert len(runs) == 2
