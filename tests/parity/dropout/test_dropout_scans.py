"""Dropout inside a scan: torch's loop over layers or times has a mask in each round, and so has every step of the scan."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from helpers import random
from torch import nn, optim

import parity

E, LAYERS = 3, 3
X = random("dropout scans").standard_normal((2, 4, E)).astype(np.float32)
RENAME = {"h.{i}": "h[{i}]"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.one, self.two = nn.Linear(E, E), nn.Dropout(0.3), nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        return x + self.two(torch.tanh(self.one(self.lin(x))))


class Stack(nn.Module):
    """Layers one after another, in either order, and a dropout of the same shape at the end."""

    def __init__(self, reverse: bool = False) -> None:
        super().__init__()
        self.h, self.end, self.reverse = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Dropout(0.2), reverse

    def forward(self, x: Any) -> Any:
        for layer in reversed(self.h) if self.reverse else self.h:
            x = layer(x)
        return self.end(x)


class FlaxLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.lin = nnx.Linear(E, E, rngs=rngs)
        self.one, self.two = nnx.Dropout(0.3, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.two(jnp.tanh(self.one(self.lin(x))))


class FlaxStack(nnx.Module):
    def __init__(self, reverse: bool = False) -> None:
        made = nnx.vmap(FlaxLayer)
        self.h = nnx.split_rngs(splits=LAYERS)(made)(nnx.Rngs(0))
        self.end, self.reverse = nnx.Dropout(0.2, rngs=nnx.Rngs(1)), reverse

    def __call__(self, x: Any) -> Any:
        along = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry, reverse=self.reverse)
        return self.end(along(self.h, x))


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        hidden = linen.Dropout(0.3, deterministic=False, name="one")(linen.Dense(E, name="lin")(x))
        return x + linen.Dropout(0.1, deterministic=False, name="two")(jnp.tanh(hidden)), None


class LinenStack(linen.Module):
    split: bool = True

    @linen.compact
    def __call__(self, x: Any) -> Any:
        keys = {"params": True, "dropout": self.split}
        layers = linen.scan(LinenLayer, variable_axes={"params": 0}, split_rngs=keys, length=LAYERS)
        return linen.Dropout(0.2, deterministic=False, name="end")(layers(name="h")(x, None)[0])


def recorded(ours: nn.Module, x: Any = X) -> Any:
    with parity.record_dropout(ours) as masks:
        return masks, ours(torch.tensor(x)).detach().numpy()


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reverse", [pytest.param(False, marks=pytest.mark.slow), True])
def test_layers_under_a_scan_drop_as_torchs_loop_does(reverse):
    ours, theirs = Stack(reverse), FlaxStack(reverse)
    parity.transfer(ours, theirs, rename=RENAME)
    masks, expected = recorded(ours)
    original = jax.lax.scan
    with parity.replay_dropout(theirs, masks, rename=RENAME):
        actual = theirs(X)
    close(actual, expected)
    assert jax.lax.scan is original


@pytest.mark.slow
def test_masks_may_be_arguments_of_a_compiled_gradient():
    ours, theirs = Stack(), FlaxStack()
    parity.transfer(ours, theirs, rename=RENAME)
    masks, expected = recorded(ours)
    graphdef, parameters, rest = nnx.split(theirs, nnx.Param, ...)

    @jax.jit
    def step(parameters: Any, arrays: Any) -> Any:
        def loss(parameters: Any) -> Any:
            model = nnx.merge(graphdef, parameters, jax.tree.map(jnp.asarray, rest))
            with parity.replay_dropout(model, masks, arrays, rename=RENAME):
                return jnp.square(model(X)).sum()

        return jax.value_and_grad(loss)(parameters)

    value, gradients = step(parameters, masks.arrays())
    close(value, np.square(expected).sum())
    with parity.replay_dropout(ours, masks):
        ours(torch.tensor(X)).square().sum().backward()
    close(gradients["h"]["lin"]["kernel"][1], ours.h[1].lin.weight.grad.T)
    again, other = recorded(ours)
    assert again.plan == masks.plan
    close(step(parameters, again.arrays())[0], np.square(other).sum())


def linens(ours: nn.Module, split: bool) -> Any:
    module = LinenStack(split)
    variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    empty = parity.Linen(module, variables, X, rngs={"dropout": jax.random.key(2)})
    return parity.transfer(ours, empty, rename=RENAME).value


def replayed(theirs: Any, masks: Any) -> Any:
    with parity.replay_dropout(theirs, masks, rename=RENAME):
        return theirs.module.apply(theirs.variables, X, rngs=theirs.rngs)


def test_linen_too_and_one_key_for_all_layers_is_a_fault():
    ours = Stack()
    masks, expected = recorded(ours)
    close(replayed(linens(ours, split=True), masks), expected)
    message = r"(?s)4 problems.*torch drops at h.1.one once more often than flax .* in a scan by a new key in every step"
    with pytest.raises(parity.DivergenceError, match=message):
        replayed(linens(ours, split=False), masks)


@pytest.mark.slow
def test_what_flax_drew_in_a_scan_torch_replays():
    ours, theirs = Stack(), FlaxStack()
    parity.transfer(ours, theirs, rename=RENAME)
    with parity.record_dropout(theirs) as masks:
        expected = theirs(X)
    with parity.replay_dropout(ours, masks, rename=RENAME):
        close(ours(torch.tensor(X)).detach(), expected)


def test_stacked_layers_train_alike_and_their_moments_travel_both_ways():
    ours, theirs = Stack(), FlaxStack()
    parity.transfer(ours, theirs, rename=RENAME)
    adam: Any = dict(lr=0.01, weight_decay=0.1)
    recipe = parity.Recipe(train=True, mode="eager")
    batches = [(X,), (X[::-1],)]
    found = parity.train_both(ours, theirs, (optim.AdamW, adam), batches, "square", recipe=recipe, rename=RENAME)
    assert found.passed and max(drift.values for drift in found.drift) < 1e-13

    optimizer = optim.AdamW(ours.parameters(), **adam)
    ours(torch.tensor(X)).square().sum().backward()
    optimizer.step()
    twin = parity.to_optax(optimizer, ours, theirs, rename=RENAME)
    state = parity.transfer_optimizer(optimizer, twin.init(nnx.state(theirs, nnx.Param)), ours, theirs, rename=RENAME)
    assert len(state.arrays) == 2 * 2 * LAYERS and state.steps == (1,)
    again = optim.AdamW(ours.parameters(), **adam)
    parity.transfer_optimizer(state.value, again, ours, theirs, rename=RENAME)
    for p in ours.parameters():
        assert all(torch.equal(value, again.state[p][name]) for name, value in optimizer.state[p].items())


def test_stacked_layers_of_several_groups_are_refused():
    ours, theirs = Stack(), FlaxStack()
    groups = [{"params": [*layer.parameters()], "lr": 0.1 * (1 + place)} for place, layer in enumerate(ours.h)]
    with pytest.raises(parity.TransferError, match=r"h.lin.kernel stacks h.0.lin.weight and .*which torch treats differently"):
        parity.to_optax(optim.SGD(groups), ours, theirs, rename=RENAME)


class Nested(nnx.Module):
    """A scan in a scan."""

    def __call__(self, x: Any) -> Any:
        def inner(carry: Any, _: Any) -> Any:
            x, key = carry
            key, now = jax.random.split(key)
            return (x * jax.random.bernoulli(now, 0.7, x.shape), key), None

        def outer(carry: Any, _: Any) -> Any:
            return jax.lax.scan(inner, carry, None, length=2)

        return jax.lax.scan(outer, (x, jax.random.key(0)), None, length=2)[0][0]


class ByRow(nnx.Module):
    """One row of the batch after the other, all at once."""

    def __init__(self) -> None:
        self.drop = nnx.Dropout(0.3)

    def __call__(self, x: Any) -> Any:
        return jax.vmap(lambda row, key: self.drop(row, rngs=key))(x, jax.random.split(jax.random.key(0), len(x)))


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (Nested, "dropout in a scan inside a scan cannot be replayed; write the outer one as a Python loop"),
        (ByRow, "if that is inside jax.vmap, give the model the whole batch meanwhile"),
    ],
)
def test_what_cannot_be_replayed_says_what_to_do(theirs, message):
    ours = nn.Sequential()
    ours.add_module("drop", nn.Dropout(0.3))
    masks, _ = recorded(ours)
    model = theirs()
    with pytest.raises(parity.DivergenceError, match=message), parity.replay_dropout(model, masks):
        model(X)


def test_masks_that_cannot_be_written_are_refused_and_a_full_disk_leaves_the_old_ones(tmp_path, monkeypatch):
    masks, _ = recorded(Stack())
    with pytest.raises(parity.InputError, match=r"cannot be written: .*; give a folder that exists and has room"):
        masks.save(tmp_path / "none" / "masks")
    with pytest.raises(parity.InputError, match="is no file that could be replaced; give the path of a file"):
        masks.save(tmp_path)
    masks.save(tmp_path / "masks")
    before = (tmp_path / "masks").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(parity.InputError, match="No space left on device"):
        masks.save(tmp_path / "masks")
    assert (tmp_path / "masks").read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["masks"]
