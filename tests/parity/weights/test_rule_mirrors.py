"""Layers of torch for which Flax has no class: functions, modules of the user's own, and what nothing stands for."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import nnx
from helpers import random
from rule_cases import agree, levels, randomised, rngs
from torch import nn
from transfer_helpers import snapshot

import parity
from parity.weights.mirrors import ACTIVATIONS


class TorchNet(nn.Module):
    def __init__(self, act: Any):
        super().__init__()
        self.line, self.act = nn.Linear(3, 4), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.line(x))


class FlaxNet(nnx.Module):
    def __init__(self, act: Any):
        self.line, self.act = nnx.Linear(3, 4, rngs=rngs()), act

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.act(self.line(x))


class LeakyReLU(nnx.Module):
    """An activation of the user's own that shows its setting."""

    def __init__(self, negative_slope: float = 0.01):
        self.negative_slope = negative_slope

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.leaky_relu(x, self.negative_slope)


GIVEN = functools.partial
# The module, the function that is the same, and one that is not, with what is told of it.
FUNCTIONS: dict[str, tuple[nn.Module, Any, Any, str]] = {
    "GELU": (
        *(nn.GELU(), GIVEN(jax.nn.gelu, approximate=False), nnx.gelu),
        "approximate='none' in torch, approximate=True in Flax; set approximate=False",
    ),
    "GELU tanh": (
        *(nn.GELU("tanh"), nnx.gelu, GIVEN(nnx.gelu, approximate=False)),
        "approximate='tanh' in torch, approximate=False in Flax; set approximate=True",
    ),
    "LeakyReLU": (
        *(nn.LeakyReLU(0.2), GIVEN(nnx.leaky_relu, negative_slope=0.2), nnx.leaky_relu),
        "negative_slope=0.2 in torch, negative_slope=0.01 in Flax; set negative_slope=0.2",
    ),
    "LeakyReLU of one's own": (
        *(nn.LeakyReLU(0.2), LeakyReLU(0.2), LeakyReLU()),
        "negative_slope=0.2 in torch, negative_slope=0.01 in Flax; set negative_slope=0.2",
    ),
    "ELU": (nn.ELU(0.5), GIVEN(nnx.elu, alpha=0.5), nnx.elu, "alpha=0.5 in torch, alpha=1.0 in Flax; set alpha=0.5"),
    "CELU": (nn.CELU(2.0), GIVEN(nnx.celu, alpha=2.0), nnx.celu, "alpha=2.0 in torch, alpha=1.0 in Flax"),
    "Softmax": (nn.Softmax(-1), nnx.softmax, GIVEN(nnx.softmax, axis=-2), "dim=-1 in torch, axis=-2 in Flax; set axis=-1"),
    "LogSoftmax": (nn.LogSoftmax(-1), nnx.log_softmax, GIVEN(nnx.log_softmax, axis=-2), "dim=-1 in torch, axis=-2 in Flax"),
    "GLU": (nn.GLU(-1), nnx.glu, GIVEN(nnx.glu, axis=-2), "dim=-1 in torch, axis=-2 in Flax"),
    "Softplus": (nn.Softplus(), nnx.softplus, nnx.silu, "torch.nn.Softplus in torch, jax.nn.silu in Flax; set jax.nn.softplus"),
    "Hardtanh": (nn.Hardtanh(), nnx.hard_tanh, nnx.tanh, "torch.nn.Hardtanh in torch, jax.numpy.tanh in Flax"),
    "ReLU": (nn.ReLU(), nnx.relu, nnx.relu6, "torch.nn.ReLU in torch, jax.nn.relu6 in Flax; set jax.nn.relu"),
    "ReLU6": (nn.ReLU6(), nnx.relu6, nnx.relu, "torch.nn.ReLU6 in torch, jax.nn.relu in Flax"),
    "SiLU": (nn.SiLU(), nnx.swish, jax.nn.mish, "torch.nn.SiLU in torch, jax.nn.mish in Flax; set jax.nn.silu"),
    "Mish": (nn.Mish(), jax.nn.mish, nnx.silu, "torch.nn.Mish in torch, jax.nn.silu in Flax"),
    "SELU": (nn.SELU(), nnx.selu, nnx.elu, "torch.nn.SELU in torch, jax.nn.elu in Flax"),
    "Sigmoid": (nn.Sigmoid(), nnx.sigmoid, nnx.log_sigmoid, "torch.nn.Sigmoid in torch, jax.nn.log_sigmoid in Flax"),
    "LogSigmoid": (nn.LogSigmoid(), nnx.log_sigmoid, nnx.sigmoid, "torch.nn.LogSigmoid in torch, jax.nn.sigmoid in Flax"),
    "Softsign": (nn.Softsign(), nnx.soft_sign, nnx.tanh, "torch.nn.Softsign in torch, jax.numpy.tanh in Flax"),
    "Hardsigmoid": (nn.Hardsigmoid(), nnx.hard_sigmoid, nnx.sigmoid, "torch.nn.Hardsigmoid in torch, jax.nn.sigmoid in Flax"),
    "Hardswish": (nn.Hardswish(), nnx.hard_swish, nnx.swish, "torch.nn.Hardswish in torch, jax.nn.silu in Flax"),
    "Tanh": (nn.Tanh(), jnp.tanh, nnx.hard_tanh, "torch.nn.Tanh in torch, jax.nn.hard_tanh in Flax; set jax.numpy.tanh"),
}


def test_every_activation_of_the_table_is_tried():
    assert {f"torch.nn.{type(row[0]).__name__}" for row in FUNCTIONS.values()} == set(ACTIVATIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_function_in_the_place_of_an_activation_is_the_same_or_told_of(name):
    act, right, wrong, sentence = FUNCTIONS[name]
    source = randomised(TorchNet(act), "activation")
    target = FlaxNet(right)
    assert parity.transfer(source, target).settings == ()
    x = torch.from_numpy(random("activation x").standard_normal((2, 5, 3)).astype(np.float32) * 2)
    agree(source, target, x)
    told = parity.transfer(source, FlaxNet(wrong)).settings
    assert len(told) == 1
    assert told[0].startswith(f"act: {sentence}")


@pytest.mark.parametrize(
    ("act", "function", "sentence"),
    [
        (nn.Softplus(2.0), nnx.softplus, "beta=2.0 in torch, jax.nn.softplus computes beta=1.0; write the function out"),
        (nn.Hardtanh(0.0, 1.0), nnx.hard_tanh, "min_val=0.0 in torch, jax.nn.hard_tanh computes min_val=-1.0"),
    ],
)
def test_a_setting_that_the_function_has_not_is_told(act, function, sentence):
    assert sentence in parity.transfer(TorchNet(act), FlaxNet(function)).settings[0]


@pytest.mark.parametrize("function", [lambda x: x, np.tanh, nnx.Linear(4, 4, use_bias=False, rngs=rngs())])
def test_what_a_function_computes_is_not_guessed(function):
    ignore = ("act.*",) if isinstance(function, nnx.Module) else ()
    assert parity.transfer(TorchNet(nn.ReLU()), FlaxNet(function), ignore=ignore).settings == ()


def test_axes_that_cannot_be_told_apart_are_not_compared():
    assert parity.transfer(TorchNet(nn.Softmax(1)), FlaxNet(nnx.softmax)).settings == ()


def test_functions_in_a_sequential_are_numbered_as_modules_are():
    source = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 4))
    target = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs()), nnx.gelu, nnx.Linear(4, 4, rngs=rngs()))
    (told,) = parity.transfer(source, target).settings
    assert told == "1: approximate='none' in torch, approximate=True in Flax; set approximate=False"


# ---------------------------------------------------------------- Transformer layers


class EncoderLayer(nnx.Module):
    """torch.nn.TransformerEncoderLayer in NNX, with its names."""

    def __init__(self, activation: Callable[..., Any], **settings: Any):
        self.norm_first, self.batch_first = settings["norm_first"], settings["batch_first"]
        self.layer_norm_eps, self.dropout_rate = settings["layer_norm_eps"], settings["dropout"]
        self.self_attn = nnx.MultiHeadAttention(2, 8, rngs=rngs())
        self.linear1, self.linear2 = nnx.Linear(8, 12, rngs=rngs()), nnx.Linear(12, 8, rngs=rngs())
        norms = dict(epsilon=settings["epsilon"], use_fast_variance=False)
        self.norm1, self.norm2 = (nnx.LayerNorm(8, **norms, rngs=rngs()) for _ in range(2))
        self.activation = activation

    def feed_forward(self, x: jax.Array) -> jax.Array:
        return self.linear2(self.activation(self.linear1(x)))

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.norm_first:
            normed = self.norm1(x)
            x = x + self.self_attn(normed, normed, normed, decode=False)
            return x + self.feed_forward(self.norm2(x))
        x = self.norm1(x + self.self_attn(x, x, x, decode=False))
        return self.norm2(x + self.feed_forward(x))


EXACT = functools.partial(jax.nn.gelu, approximate=False)
SETTINGS: dict[str, Any] = dict(norm_first=True, batch_first=True, layer_norm_eps=1e-3, dropout=0.0, epsilon=1e-3)


def encoder(activation: Any = F.gelu, **settings: Any) -> nn.Module:
    options = dict(norm_first=True, batch_first=True, layer_norm_eps=1e-3, dropout=0.0) | settings
    return randomised(nn.TransformerEncoderLayer(8, 2, 12, activation=activation, **options), "encoder")


def mirror(activation: Any = EXACT, **settings: Any) -> EncoderLayer:
    layer = EncoderLayer(activation, **(SETTINGS | settings))
    layer.eval()
    return layer


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(
    ("torch_activation", "flax_activation"),
    [(F.gelu, EXACT), ("relu", jax.nn.relu), (lambda x: F.gelu(x, approximate="tanh"), jax.nn.gelu)],
)
def test_a_mirror_of_an_encoder_layer_is_the_same_function(norm_first, torch_activation, flax_activation):
    source, target = encoder(torch_activation, norm_first=norm_first), mirror(flax_activation, norm_first=norm_first)
    before = snapshot(source)
    done = parity.transfer(source, target)
    assert done.passed, done.settings
    assert {entry.decided_by for entry in done.plan} == {"rule"}
    x = torch.from_numpy(random("encoder x").standard_normal((2, 5, 8)).astype(np.float32))
    agree(source, target, x)
    back = encoder(torch_activation, norm_first=norm_first)
    randomised(back, "another")
    parity.transfer(target, back)
    assert snapshot(back) == before


@pytest.mark.parametrize(
    ("source", "target", "sentence"),
    [
        (dict(), dict(norm_first=False), "norm_first=True in torch, norm_first=False in Flax; set norm_first=True"),
        (dict(), dict(batch_first=False), "self_attn.batch_first=True in torch, batch_first=False in Flax"),
        (dict(), dict(layer_norm_eps=1e-6), "norm1.eps=0.001 in torch, layer_norm_eps=1e-06 in Flax; set layer_norm_eps="),
        (dict(dropout=0.5), dict(), "dropout.p=0.5 in torch, dropout_rate=0.0 in Flax; set dropout_rate=0.5"),
        (
            dict(),
            dict(activation=jax.nn.gelu),
            "activation=gelu (exact) in torch, activation=gelu (tanh) in Flax; set the same",
        ),
        (dict(), dict(activation=jax.nn.relu), "activation=gelu (exact) in torch, activation=relu in Flax; set the same"),
        (dict(activation="relu"), dict(activation=jax.nn.silu), "activation=relu in torch, activation=silu in Flax"),
        (dict(activation=nn.ReLU()), dict(), "activation=relu in torch, activation=gelu (exact) in Flax"),
        (dict(), dict(activation="relu"), "activation=gelu (exact) in torch, activation=relu in Flax"),
    ],
)
def test_a_setting_of_a_mirror_that_does_not_agree_is_told(source, target, sentence):
    told = parity.transfer(encoder(**source), mirror(**target)).settings
    assert [one for one in told if one.startswith(f"the model: {sentence}")], told


def test_the_fused_path_of_torch_computes_another_gelu_than_its_module_says():
    source, target = encoder(nn.GELU("tanh")), mirror(jax.nn.gelu)
    (told,) = parity.transfer(source, target).settings
    assert "whose fused path in evaluation computes the exact GELU all the same" in told
    x = torch.from_numpy(random("encoder x").standard_normal((2, 5, 8)).astype(np.float32))
    with torch.no_grad():
        fused, exact = source(x), encoder(nn.GELU())(x)
    assert torch.equal(fused, exact)
    assert not torch.allclose(source(x.requires_grad_()), exact, atol=1e-5)
    assert parity.transfer(encoder(nn.GELU()), mirror()).settings == ()


@pytest.mark.parametrize("activation", ["gelu", lambda x: x, np.tanh])
def test_an_activation_that_does_not_say_what_it_is_is_not_compared(activation):
    assert not [told for told in parity.transfer(encoder(), mirror(activation)).settings if "activation" in told]


def test_a_wrong_order_of_the_norms_is_seen_by_numbers_too():
    source, target = encoder(norm_first=True), mirror(norm_first=False)
    parity.transfer(source, target)
    x = torch.from_numpy(random("encoder x").standard_normal((2, 5, 8)).astype(np.float32))
    report = parity.compare(source, target, x, levels=("weights", "identical"))
    assert levels(report) == {"weights": "failed", "identical": "failed"}


# ---------------------------------------------------------------- without counterpart


class Parameters(nnx.Module):
    """A module of the user's own that keeps torch's names and shapes."""

    def __init__(self, layer: nn.Module):
        for name, p in layer.named_parameters():
            setattr(self, name, nnx.Param(jnp.zeros(p.shape)))


class Bilinear(Parameters):
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum("...i,oij,...j->...o", x, self.weight[...], y) + self.bias[...]


class EmbeddingBag(Parameters):
    def __call__(self, indices: jax.Array) -> jax.Array:
        return self.weight[...][indices].sum(1)


@pytest.mark.parametrize(
    ("layer", "flax", "inputs", "sentence"),
    [
        (nn.Bilinear(3, 4, 5), Bilinear, ((2, 3), (2, 4)), "jnp.einsum('...i,oij,...j->...o', x1, weight, x2) + bias"),
        (nn.EmbeddingBag(7, 4, mode="sum"), EmbeddingBag, None, "weight[indices].sum(1)"),
    ],
)
def test_a_layer_that_flax_has_not_says_what_to_write_and_that_is_the_same_function(layer, flax, inputs, sentence):
    source = randomised(layer, "no counterpart")
    for pair in ((source, nnx.Linear(3, 5, rngs=rngs())), (nnx.Linear(3, 5, rngs=rngs()), source)):
        with pytest.raises(parity.TransferError) as refused:
            parity.transfer(*pair)
        assert "no such layer; write a module with an nnx.Param weight" in str(refused.value)
        assert sentence in str(refused.value)
    target = flax(layer)
    parity.transfer(source, target)
    rng = random("bilinear")
    x = [rng.standard_normal(shape).astype(np.float32) for shape in inputs or ()] or [rng.integers(0, 7, (3, 2))]
    agree(source, target, *map(torch.from_numpy, x))


def test_a_layer_of_torch_without_a_rule_is_named_as_such():
    layer = nn.Module.__new__(nn.CrossMapLRN2d)
    nn.Module.__init__(layer)
    layer.gain = nn.Parameter(torch.ones(3))
    source = nn.ModuleDict({"norm": layer})
    target = nnx.Dict(norm=nnx.Linear(3, 3, rngs=rngs()))
    for pair in ((source, target), (target, source)):
        with pytest.raises(parity.TransferError, match=r"torch\.nn\.CrossMapLRN2d has no rule yet, add one by parity"):
            parity.transfer(*pair)


def test_containers_of_parameters_are_no_layers_without_a_rule():
    source = nn.ParameterList([torch.ones(2)])
    with pytest.raises(parity.TransferError) as refused:
        parity.transfer(source, nnx.Dict(w=nnx.Param(jnp.ones(3))))
    assert "has no rule yet" not in str(refused.value)


def test_lazy_layers_are_what_they_became():
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with pytest.raises(parity.InputError, match="of a lazy module has no shape yet"):
        parity.transfer(lazy, nnx.Sequential(nnx.Linear(3, 4, rngs=rngs())))
    lazy(torch.ones(2, 3))
    norm = nnx.BatchNorm(4, use_fast_variance=False, momentum=0.9, epsilon=1e-5, rngs=rngs())
    target = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs()), norm)
    done = parity.transfer(lazy.eval(), target)
    assert done.passed, done.settings
    assert {entry.decided_by for entry in done.plan} == {"rule"}


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (nnx.LinearGeneral((2, 3), 8, axis=(-1, -2), rngs=rngs()), r"axis=\(-1, -2\) in Flax, torch takes the last axes in"),
        (nnx.Einsum("...i,oi->...o", (8, 6), rngs=rngs()), r"einsum_str='...i,oi->...o' in Flax is no linear layer"),
        (nnx.Einsum("...ij,jio->...o", (3, 2, 8), rngs=rngs()), "the kernel's axes must be the last ones of the"),
        (nnx.Einsum("i...,io->o...", (6, 8), rngs=rngs()), "the kernel's axes must be the last ones of the"),
        (nnx.LinearGeneral(6, (2, 3), rngs=rngs()), r"so layer.kernel must have \(6, 8\), each in one axis or several"),
    ],
)
def test_a_general_layer_that_is_no_linear_layer_of_torch_is_refused(layer, sentence):
    source, target = nn.ModuleDict({"layer": nn.Linear(6, 8, bias=False)}), nnx.Dict(layer=layer)
    with pytest.raises(parity.TransferError, match=sentence):
        parity.transfer(source, target, ignore=("layer.bias",) if layer.bias is not None else ())


def test_statistics_over_processes_are_told_of():
    target = nnx.BatchNorm(6, use_fast_variance=False, momentum=0.9, epsilon=1e-5, rngs=rngs())
    for layer, count in ((nn.SyncBatchNorm(6), 1), (nn.BatchNorm2d(6), 0)):
        told = parity.transfer(layer, target).alone
        assert sum("takes its statistics over all processes" in sentence for sentence in told) == count
