import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dropout_pairs import (
    IMAGES,
    Drops,
    FlaxDrops,
    FlaxImages,
    FlaxTwice,
    Images,
    Layer,
    LinenLayer,
    Twice,
    X,
    linen_of,
    program,
    recorded,
    run_linen,
    torch_layer,
)
from flax import linen, nnx
from helpers import random
from torch import nn
from transformer_cases import N_SOURCE, N_TARGET, SIZES, ids

import jax_impl
import parity
import torch_impl
from parity.frameworks.jax.running import QUICK

# Float32 sums of a layer in another order.
NEAR = {"rtol": 1e-5, "atol": 1e-5}
eager, compiled = (lambda model, x: model(x)), nnx.jit(lambda model, x: model(x))


def merged(model):
    """A call that leaves the model's random state alone."""
    graphdef, state = nnx.split(model)

    def call(x):
        return nnx.merge(graphdef, jax.tree.map(lambda array: array, state))(x)

    return call


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_a_drop_is_bit_equal_forwards_and_backwards(dtype):
    x = torch.from_numpy(random("bits", dtype).standard_normal((7, 33))).to(getattr(torch, dtype)).requires_grad_()
    cotangent = torch.from_numpy(random("bits back").standard_normal((7, 33))).to(x.dtype)
    with jax.enable_x64(dtype == "float64"):
        plain, back = (jnp.asarray(t.detach().double().numpy(), dtype) for t in (x, cotangent))
        for rate in (0.15, 0.9):
            x.grad = None
            model, flax = nn.Dropout(rate), nnx.Dropout(rate, rngs=nnx.Rngs(0))
            ours = parity.Linen(linen.Dropout(rate, deterministic=False), {}, plain, rngs={"dropout": jax.random.key(0)})
            with parity.record_dropout(model) as masks:
                y = model(x)
                y.backward(cotangent)
            for twin, call in ((flax, merged(flax)), (ours, lambda x, ours=ours: run_linen(ours, {}, x))):
                for run in (call, jax.jit(call)) if (rate, dtype) == (0.15, "float32") else (call,):
                    with parity.replay_dropout(twin, masks):
                        output, pull = jax.vjp(run, plain)
                        (gradient,) = pull(back)
                    assert np.array_equal(np.asarray(output, np.float64), y.detach().double().numpy())
                    assert np.array_equal(np.asarray(gradient, np.float64), x.grad.double().numpy())


@pytest.mark.parametrize("need", [False, True], ids=["fused attention", "attention weights"])
def test_torchs_own_layer_in_nnx(need):
    model, flax = torch_layer(), Layer(nnx.Rngs(0), remat=need)
    if need:
        attend = model.self_attn.forward
        model.self_attn.forward = lambda *args, need_weights, **kwargs: attend(*args, need_weights=True, **kwargs)
    parity.transfer(model, flax)
    masks, y = recorded(model, X)
    assert [d.path for d in masks.drops] == ["self_attn", "dropout1", "dropout", "dropout2"]
    assert masks.drops[0].shape == ((6, 5, 5) if need else (3, 2, 5, 5)) and masks.drops[0].kind == "attention"
    with parity.replay_dropout(flax, masks):
        np.testing.assert_allclose(program(flax)(X), y, **NEAR)
    assert not any("parity" in name for module in (flax, flax.dropout) for name in vars(module))


def test_torchs_own_layer_in_linen():
    model = torch_layer()
    flax = linen_of(LinenLayer(), model, train=True)
    masks, y = recorded(model, X)
    step = jax.jit(lambda variables, x: run_linen(flax, variables, x), compiler_options=QUICK["cpu"])
    before = step(flax.variables, X)
    with parity.replay_dropout(flax, masks):
        np.testing.assert_allclose(step(flax.variables, X), y, **NEAR)
    # Behind it the function drops by itself again.
    assert np.array_equal(step(flax.variables, X), before) and not np.allclose(before, y, **NEAR)


@pytest.mark.parametrize("side", ["nnx", "linen"])
def test_one_compiled_step_takes_the_masks_of_each_run(side):
    model = torch_layer().double()
    x = torch.from_numpy(X).double()
    with jax.enable_x64(True):
        flax: Any = Layer(nnx.Rngs(0)) if side == "nnx" else linen_of(LinenLayer(), None, train=True)
        wide = parity.transfer(model, flax, cast="float64").value if side == "linen" else flax
        graphdef, state = nnx.split(flax) if side == "nnx" else (None, wide.variables)
        if side == "nnx":
            doubled = jax.tree.map(lambda a: a.astype("float64") if jnp.issubdtype(a.dtype, jnp.floating) else a, state)
            parity.transfer(model, twin := nnx.merge(graphdef, doubled))
            state = nnx.split(twin)[1]

        @functools.partial(jax.jit, compiler_options=QUICK["cpu"])
        def step(state: Any, arrays: Any) -> Any:
            def loss(state: Any) -> Any:
                one = nnx.merge(graphdef, state) if side == "nnx" else wide
                with parity.replay_dropout(one, plan, arrays):
                    y = one(jnp.asarray(x.numpy())) if side == "nnx" else run_linen(one, state, jnp.asarray(x.numpy()))
                return (y**3).sum()

            return jax.grad(loss, allow_int=True)(state)

        plan = None
        for _ in range(3):
            model.zero_grad()
            with parity.record_dropout(model) as masks:
                (model(x) ** 3).sum().backward()
            plan = plan or masks
            assert masks.plan == plan.plan
            gradients = step(state, masks.arrays())
            found = gradients["linear1"]["kernel"][...] if side == "nnx" else gradients["params"]["linear1"]["kernel"]
            np.testing.assert_allclose(found, model.linear1.weight.grad.numpy().T, rtol=1e-9, atol=1e-11)
        assert step._cache_size() == 1


@pytest.mark.parametrize("apart", [False, True], ids=["shared", "apart"])
def test_modules_called_twice_and_a_dropout_that_is_shared(apart):
    model, flax = Twice(), FlaxTwice(nnx.Rngs(0), apart=apart)
    parity.transfer(model, flax)
    masks, y = recorded(model, X)
    assert [(d.path, d.call) for d in masks.drops] == [("drop", call) for call in range(4)]
    with parity.replay_dropout(flax, masks):
        np.testing.assert_allclose(flax(X), y, **NEAR)
    # The model of a state that was split before.
    graphdef, state = nnx.split(flax)
    run = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    run(state, X)
    with parity.replay_dropout(flax, masks):
        np.testing.assert_allclose(run(state, X), y, **NEAR)


def test_the_channels_of_feature_maps_are_last():
    model, flax = Images(), FlaxImages(nnx.Rngs(0))
    parity.transfer(model, flax)
    masks, y = recorded(model, IMAGES)
    assert [(d.kind, d.shape) for d in masks.drops] == [("channels", (3, 4, 1, 1)), ("element", (3, 4, 3, 5))]
    last = IMAGES.transpose(0, 2, 3, 1)
    for named in (None, ("*",), ("channels", "elements")):
        with parity.replay_dropout(flax, masks, channels_last=named):
            np.testing.assert_allclose(flax(last), y.transpose(0, 2, 3, 1), **NEAR)
    message = "elements: the masks have other shapes"
    with (
        pytest.raises(parity.DivergenceError, match=message),
        parity.replay_dropout(flax, masks, channels_last=("channels",)),
    ):
        flax(last)


def test_channels_first_or_last_is_asked_where_shapes_do_not_tell():
    model, flax = Images(), FlaxImages(nnx.Rngs(0))
    parity.transfer(model, flax)
    square = np.ascontiguousarray(np.broadcast_to(IMAGES[..., :1, :1], (3, 2, 6, 6)))
    masks, y = recorded(model, square)
    with (
        pytest.raises(parity.DivergenceError, match=r"elements drops in shape \(3, 4, 4, 4\), .*channels_last=\('elements',\)"),
        parity.replay_dropout(flax, masks),
    ):
        flax(square.transpose(0, 2, 3, 1))
    with parity.replay_dropout(flax, masks, channels_last=("*",)):
        np.testing.assert_allclose(flax(square.transpose(0, 2, 3, 1)), y.transpose(0, 2, 3, 1), **NEAR)


def test_the_transformer_of_both_wings():
    options = {**SIZES, "n_layers": 1, "p_attention": 0.2, "p_drop": 0.3}
    model = torch_impl.Transformer(N_SOURCE, N_TARGET, torch_impl.TransformerConfig(**options))
    flax = jax_impl.Transformer(N_SOURCE, N_TARGET, jax_impl.TransformerConfig(**options), rngs=nnx.Rngs(0))
    parity.transfer(model, flax)
    source, target = ids("int32")
    masks, y = recorded(model, source, target)
    assert len(masks) == 12
    with parity.replay_dropout(flax, masks):
        np.testing.assert_allclose(program(flax)(source, target), y, **NEAR)


def test_masks_of_flax_in_torch_bit_for_bit():
    model, flax = Drops(), FlaxDrops()
    for run in (eager, compiled):
        with parity.record_dropout(flax) as masks:
            y = run(flax, X)
        assert masks.source == "flax" and [d.kind for d in masks.drops] == ["element", "element"]
        with parity.replay_dropout(model, masks), parity.record_dropout(model) as seen:
            again = model(torch.from_numpy(X))
        assert all(np.array_equal(a.mask, b.mask) for a, b in zip(masks.drops, seen.drops, strict=True))
        np.testing.assert_allclose(again, y, rtol=1e-6, atol=1e-5)
    model.b.eval()
    message = "dropout is missing: flax drops at b once more often than torch .*; drop there too, in train mode$"
    with pytest.raises(parity.DivergenceError, match=message), parity.replay_dropout(model, masks):
        model(torch.from_numpy(X))


def test_names_of_the_transfer():
    class Other(nnx.Module):
        def __init__(self) -> None:
            self.b, self.c = nnx.Dropout(0.25, rngs=nnx.Rngs(0)), nnx.Dropout(0.4, rngs=nnx.Rngs(1))

        def __call__(self, x: Any) -> Any:
            short = 16 * self.c(x[..., :4]).sum(-1, keepdims=True)
            return self.b(x) + short

    model, flax = Drops(), Other()
    masks, y = recorded(model, X)
    with parity.replay_dropout(flax, masks, rename={"a": "b", "b": "c"}):
        np.testing.assert_allclose(flax(X), y, rtol=1e-6, atol=1e-5)
    inverse = {"b": "a", "c": "b"}
    with parity.record_dropout(flax) as drawn:
        y = flax(X)
    with parity.replay_dropout(model, drawn, rename={new: old for old, new in inverse.items()}):
        np.testing.assert_allclose(model(torch.from_numpy(X)), y, rtol=1e-6, atol=1e-5)


def test_a_compiled_function_does_not_keep_masks():
    model, flax = Drops(), FlaxDrops()
    first, y1 = recorded(model, X)
    second, y2 = recorded(model, X)
    run = nnx.jit(lambda model, x: model(x))
    for masks, y in ((first, y1), (second, y2), (first, y1)):
        with parity.replay_dropout(flax, masks):
            np.testing.assert_allclose(run(flax, X), y, rtol=1e-6, atol=1e-5)
    with parity.record_dropout(model) as both:
        ys = [model(torch.from_numpy(X)).numpy() for _ in range(2)]
    with parity.replay_dropout(flax, both):
        for y in ys:
            np.testing.assert_allclose(run(flax, X), y, rtol=1e-6, atol=1e-5)
    message = "2 problems\n  - dropout too often: flax drops at a once more often"
    with pytest.raises(parity.DivergenceError, match=message), parity.replay_dropout(flax, first):
        [run(flax, X) for _ in range(2)]


def test_another_model_beside_keeps_its_own_masks():
    model, flax, teacher = Drops(), FlaxDrops(), nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    masks, y = recorded(model, X)
    with parity.replay_dropout(flax, masks):
        drawn = teacher(X)
        np.testing.assert_allclose(flax(X), y, rtol=1e-6, atol=1e-5)
    assert set(np.unique(np.asarray(drawn == 0))) == {False, True}


def test_wrong_arguments():
    masks, _ = recorded(Drops(), X)
    flax = FlaxDrops()
    wrong = {"a": masks.arrays()["a"], "c": [np.ones((2, 2), bool)]}
    with (
        pytest.raises(
            parity.InputError, match=r"3? problems\n  - b has masks of shapes \[\], expected \[\(3, 5, 4\)\]\n  - c has"
        ),
        parity.replay_dropout(flax, masks, wrong),
    ):
        pass
    for call, message in (
        (lambda: parity.replay_dropout(flax, {"a": 1}), "masks must be what parity.record_dropout gave, got a dict"),
        (lambda: parity.replay_dropout("model", masks), "replay_dropout takes a torch.nn.Module, .* got str"),
        (lambda: parity.record_dropout(np.ones(3)), "record_dropout takes a torch.nn.Module, .* got numpy.ndarray"),
    ):
        with pytest.raises(parity.InputError, match=message), call():
            pass
