import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropout_pairs import FAULTS, Drops, FlaxDrops, X, recorded, run_linen
from flax import linen, nnx

import parity

MASKS, Y = recorded(Drops(), X)


# Operation by operation those of them that look at numbers and those at the end of a run; shapes tell the others.
@pytest.mark.parametrize(
    ("fault", "way"),
    [(fault, "compiled") for fault in FAULTS]
    + [(fault, way) for fault in ("unscaled", "missing", "broadcast over the batch") for way in ("eager", "traced masks")],
)
def test_a_planted_fault_is_named(fault, way):
    flax = FlaxDrops(fault)
    with pytest.raises(parity.DivergenceError, match=FAULTS[fault]):
        WAYS[way](flax)
    # The model is as it was.
    assert not any("parity" in name for name in vars(flax.b))
    assert np.asarray(flax.b(X)).shape == X.shape


def replayed(model, arrays=None):
    with parity.replay_dropout(model, MASKS, arrays):
        return model(X)


def compiled(flax):
    with parity.replay_dropout(flax, MASKS):
        # Shapes tell as much as numbers: nothing need be compiled.
        return nnx.eval_shape(lambda model, x: model(x), flax, X)


def traced(flax):
    graphdef, state = nnx.split(flax)
    return jax.eval_shape(lambda state, arrays: replayed(nnx.merge(graphdef, state), arrays), state, MASKS.arrays())


WAYS = {"eager": replayed, "compiled": compiled, "traced masks": traced}


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_the_same_without_a_fault(way):
    flax = FlaxDrops()
    with parity.replay_dropout(flax, MASKS):
        y = flax(X) if way == "eager" else nnx.jit(lambda model, x: model(x))(flax, X)
    np.testing.assert_allclose(y, Y, rtol=1e-6, atol=1e-5)


def test_all_faults_come_at_once():
    flax = FlaxDrops("broadcast over the batch")
    flax.b = nnx.Dropout(0.2, rngs=nnx.Rngs(0))
    with pytest.raises(parity.DivergenceError) as error, parity.replay_dropout(flax, MASKS):
        [flax(X), flax.b(X)]
    text = str(error.value)
    assert "3 problems" in text
    assert all(part in text for part in ("a: flax broadcasts", "b drops at another rate", "too often: flax drops at b once"))


def test_an_error_of_the_model_is_not_hidden():
    flax = FlaxDrops()
    with pytest.raises(ZeroDivisionError), parity.replay_dropout(flax, MASKS):
        [flax(X), 1 // 0]
    assert type(jax.random.bernoulli).__name__ == "function" and "parity" not in jax.random.bernoulli.__module__
    assert not any("parity" in name for name in vars(flax.a))


class LinenDrops(linen.Module):
    fault: str = ""

    @linen.compact
    def __call__(self, x):
        broadcast = (0,) if self.fault == "broadcast" else ()
        rate = 0.3 if self.fault == "rate" else 0.25
        if self.fault == "unscaled":
            y = Unscaled(rate, name="a")(x)
        else:
            y = linen.Dropout(rate, broadcast_dims=broadcast, deterministic=self.fault == "missing", name="a")(x)
        if self.fault == "twice":
            y = linen.Dropout(rate, deterministic=False)(y)
        short = 16 * linen.Dropout(0.4, deterministic=False, name="b")(x[..., :4]).sum(-1, keepdims=True)
        return y + short


class Unscaled(linen.Module):
    rate: float

    @linen.compact
    def __call__(self, x):
        return jnp.where(jax.random.bernoulli(self.make_rng("dropout"), 1 - self.rate, x.shape), x, 0)


LINEN = {
    "broadcast": r"a: flax broadcasts one mask over axis 0: .*\(1, 5, 8\)",
    "rate": "a drops at another rate: .* 0.25, .* 0.3;",
    "unscaled": "a does not scale what it keeps: .*times 1.3.*times 1;",
    "missing": "dropout is missing: torch drops at a once more often",
    "twice": "dropout too often: flax drops at Dropout_0 once more often",
    "": "",
}


@pytest.mark.parametrize(("fault", "way"), [(fault, "compiled") for fault in LINEN] + [("unscaled", "eager"), ("", "eager")])
def test_a_planted_fault_in_linen_is_named(fault, way):
    model = parity.Linen(LinenDrops(fault), {}, jnp.asarray(X), rngs={"dropout": jax.random.key(0)})
    call = lambda x: run_linen(model, {}, x)  # noqa: E731
    run = (lambda x: jax.eval_shape(call, x)) if way == "compiled" and fault else jax.jit(call) if way == "compiled" else call
    if not fault:
        with parity.replay_dropout(model, MASKS):
            np.testing.assert_allclose(run(X), Y, rtol=1e-6, atol=1e-5)
        return
    with pytest.raises(parity.DivergenceError, match=LINEN[fault]), parity.replay_dropout(model, MASKS):
        run(X)


def test_a_scan_that_drops_by_one_mask_for_all_steps_is_found():
    class Scanned(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Dropout(0.25, rngs=nnx.Rngs(0)), nnx.Dropout(0.4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            kept = jax.random.key(0)
            return jax.lax.scan(lambda y, _: (y * jax.random.bernoulli(kept, 0.75, y.shape), None), x, None, length=2)[0]

    flax = Scanned()
    message = "torch drops at b once .*in a scan by a new key in every step"
    with pytest.raises(parity.DivergenceError, match=message), parity.replay_dropout(flax, MASKS):
        flax(jnp.asarray(X))
