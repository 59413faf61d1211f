"""A trace through layers that return in torch what they return otherwise in Flax: convolutions, recurrent layers, attention."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from evidence_pairs import altered, normal, one_ulp
from flax import linen, nnx
from torch import nn

import parity

NORM = dict(momentum=0.9, epsilon=1e-5, use_fast_variance=False)


class TorchStage(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(channels, channels, 3, padding=1), nn.BatchNorm1d(channels)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


class TorchNet(nn.Module):
    """Takes and returns channels last; between them torch has them behind the batch."""

    def __init__(self, channels: int):
        super().__init__()
        self.stages = nn.ModuleList([TorchStage(channels) for _ in range(2)])
        self.head = nn.Linear(channels, 3)

    def forward(self, x):
        x = x.transpose(1, 2)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.transpose(1, 2))


class FlaxStage(nnx.Module):
    def __init__(self, channels: int, rngs: nnx.Rngs):
        self.conv = nnx.Conv(channels, channels, (3,), padding=((1, 1),), rngs=rngs)
        self.norm = nnx.BatchNorm(channels, rngs=rngs, **NORM)

    def __call__(self, x):
        return nnx.relu(self.norm(self.conv(x)))


class FlaxNet(nnx.Module):
    def __init__(self, channels: int):
        rngs = nnx.Rngs(0)
        self.stages = nnx.List([FlaxStage(channels, rngs) for _ in range(2)])
        self.head = nnx.Linear(channels, 3, rngs=rngs)

    def __call__(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


class LinenStage(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Conv(x.shape[-1], (3,), padding=((1, 1),), name="conv")(x)
        return linen.relu(linen.BatchNorm(use_running_average=True, name="norm", **NORM)(x))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        for i in range(2):
            x = LinenStage(name=f"stages_{i}")(x)
        return linen.Dense(3, name="head")(x)


def pair(channels: int) -> tuple[nn.Module, nnx.Module]:
    torch.manual_seed(0)
    torch_model, flax_model = TorchNet(channels).eval(), FlaxNet(channels)
    flax_model.eval()
    parity.transfer(torch_model, flax_model)
    return torch_model, flax_model


# Length 5: as many channels, so that shapes do not tell the axes apart, and fewer.
@pytest.mark.parametrize("channels", [5, 4])
@pytest.mark.parametrize(
    ("variable", "path", "last"),
    [
        ("stages.0.conv.kernel", "stages.0.conv", None),
        ("stages.1.norm.scale", "stages.1.norm", "stages.1.conv"),
        ("head.kernel", "head", "stages.1"),
    ],
)
def test_a_trace_names_the_fault_behind_convolutions(channels, variable, path, last):
    torch_model, flax_model = pair(channels)
    x = normal(2, 5, channels)
    assert parity.trace(torch_model, flax_model, x).passed
    altered(flax_model, variable, one_ulp)
    found = parity.trace(torch_model, flax_model, x).first_divergence()
    assert (found.path, found.last_agreement, found.inputs) == (path, last, "agree")


@pytest.mark.parametrize("leaf", ["stages_1.norm.scale", "head.kernel"])
def test_a_trace_names_the_fault_behind_convolutions_of_linen(leaf):
    torch_model, _ = pair(4)
    x = normal(2, 5, 4)
    filled = parity.transfer(torch_model, parity.Linen(LinenNet(), None, x)).value
    assert parity.trace(torch_model, filled, x).passed

    def spoilt(path: Any, array: jax.Array) -> jax.Array:
        return array * (1 + 2**-20) if ".".join(key.key for key in path[1:]) == leaf else array

    faulty = parity.Linen(LinenNet(), jax.tree.map_with_path(spoilt, filled.variables))
    found = parity.trace(torch_model, faulty, x).first_divergence()
    assert found.path == leaf.rpartition(".")[0].replace("_", ".")


class Turned(FlaxNet):
    def __call__(self, x):
        return super().__call__(x).swapaxes(0, 1)


def test_the_axes_of_the_whole_model_and_of_other_layers_stay_where_they_are():
    torch_model, flax_model = pair(3)
    turned = Turned(3)
    turned.eval()
    parity.transfer(torch_model, turned)
    x = normal(3, 3, 3)
    assert parity.trace(torch_model, flax_model, x).passed
    assert parity.trace(torch_model, turned, x).first_divergence().path == ""

    class Linear(nnx.Linear):
        def __call__(self, inputs):
            return jnp.moveaxis(super().__call__(inputs), -1, 1)

    flax_model.head = Linear(3, 3, rngs=nnx.Rngs(0))
    parity.transfer(torch_model, flax_model)
    assert parity.trace(torch_model, flax_model, x).first_divergence().path == "head"


class TorchSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.recurrent = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x, _ = self.attention(x, x, x)
        return self.head(self.recurrent(x)[0])


class FlaxSequence(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.recurrent = nnx.RNN(nnx.OptimizedLSTMCell(4, 5, rngs=rngs))
        self.head = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.recurrent(self.attention(x, x, x)))


@pytest.mark.parametrize(
    ("variable", "path", "last"),
    [
        ("attention.out.kernel", "attention", None),
        ("recurrent.cell.dense_h.kernel", "recurrent", "attention"),
        ("head.kernel", "head", "recurrent"),
    ],
)
def test_a_trace_names_the_fault_behind_layers_that_return_more_in_torch(variable, path, last):
    torch.manual_seed(0)
    torch_model, flax_model = TorchSequence().eval(), FlaxSequence()
    with torch.no_grad():
        torch_model.recurrent.bias_hh_l0.zero_()
    flax_model.eval()
    parity.transfer(torch_model, flax_model)
    x = normal(2, 3, 4)
    trace = parity.trace(torch_model, flax_model, x)
    assert trace.passed and {step.path for step in trace.steps} >= {"attention", "recurrent", "head"}
    altered(flax_model, variable, one_ulp)
    found = parity.trace(torch_model, flax_model, x).first_divergence()
    assert (found.path, found.last_agreement) == (path, last)
