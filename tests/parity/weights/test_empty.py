"""A model without values is what nnx.eval_shape gives, and takes what is sent to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn
from transfer_helpers import rngs, snapshot

import parity

WIDTH, LAYERS = 6, 3


class Keeper(nnx.Module):
    """Every way in which a model comes to hold random state: forked, split for a stack of layers, and as it was given."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(width, 2 * width, rngs=rngs)

        self.first = nnx.Linear(width, width, rngs=rngs)
        self.stack = stack(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.noise = rngs.noise
        self.rngs = rngs


class TwoLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)


class Net(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(width, width, rngs=rngs)
        self.one, self.two = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)


def test_it_is_what_eval_shape_gives():
    wanted = nnx.eval_shape(lambda: Keeper(WIDTH, rngs=rngs()))
    made = parity.empty(Keeper, WIDTH)
    assert snapshot(made) == snapshot(wanted)
    assert all(data == b"abstract" for _, _, data in snapshot(made).values())
    assert nnx.graphdef(made) == nnx.graphdef(wanted)


def test_no_stream_of_the_model_repeats_its_key():
    net = parity.empty(Net, width=WIDTH)
    parity.transfer(TwoLinear(), net)
    net.train()
    x = jnp.ones((4, 50))
    drawn = [net.one(x), net.one(x), net.two(x), net.two(x)]
    assert len({a.tobytes() for a in map(jax.device_get, drawn)}) == len(drawn)


def test_it_takes_what_is_sent():
    source, net = TwoLinear(), parity.empty(lambda rngs: Net(WIDTH, rngs=rngs))
    parity.transfer(source, net)
    assert torch.equal(torch.from_dlpack(net.first.kernel[...]), source.first.weight.T)


def test_what_is_no_module_is_refused():
    with pytest.raises(parity.InputError, match=r"build must make an nnx.Module, got builtins.int"):
        parity.empty(lambda rngs: 3)


def test_a_plain_array_waits_for_its_values_too():
    def wrapped(rngs: nnx.Rngs) -> nnx.WeightNorm:
        return nnx.WeightNorm(nnx.Linear(WIDTH, 4, rngs=rngs), epsilon=0.0, rngs=rngs)

    source, x = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 4)), torch.arange(2.0 * WIDTH).reshape(2, WIDTH)
    target = parity.empty(wrapped)
    with pytest.raises(parity.InputError, match=r"holds no values at layer_instance.bias, .*scales.kernel"):
        parity.compare(source.eval(), target, x)
    assert parity.transfer(source, target).passed
    np.testing.assert_allclose(target(jnp.asarray(x.numpy())), source(x).detach().numpy(), rtol=1e-5)


class Tabled(nnx.Module):
    def __init__(self, width: int, marked: bool, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(width, width, rngs=rngs)
        self.table = nnx.data(jnp.ones(3)) if marked else jnp.ones(3)


def test_a_constant_without_values_that_nothing_fills_is_refused():
    assert parity.transfer(TwoLinear(), Tabled(WIDTH, True, rngs=rngs())).alone
    with pytest.raises(parity.TransferError, match=r"table \(3,\) of the target gets nothing from the source"):
        parity.transfer(TwoLinear(), parity.empty(Tabled, WIDTH, True))
    with pytest.raises(parity.InputError, match=r"table of the model is an array and no nnx.Variable: it has no"):
        parity.empty(Tabled, WIDTH, False)


def test_a_builder_that_takes_no_rngs_is_told_how_to_be_written():
    for build in (lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), lambda rngs, /: nnx.Linear(2, 3, rngs=rngs)):
        with pytest.raises(
            parity.InputError, match=r"build must take rngs by keyword, got <lambda>\(.*\); write it as"
        ) as caught:
            parity.empty(build)
        assert caught.value.code == "no-rngs" and "parity.empty(lambda rngs: Model(..., rngs=rngs))" in str(caught.value)
    assert type(parity.empty(lambda **given: nnx.Linear(2, 3, **given))) is nnx.Linear
