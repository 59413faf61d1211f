"""MultiheadAttention: one array of torch is three of Flax, and what goes wrong where it is cut by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers import random
from rule_cases import FlaxAttention, TorchAttention, agree, evaluated, levels, randomised, rngs
from torch import nn
from transfer_helpers import bits, snapshot

import parity
from parity.weights.layouts import HEADS_BIAS, HEADS_IN, HEADS_OUT


def torch_attention(*sizes: int, **options: object) -> TorchAttention:
    return randomised(TorchAttention(nn.MultiheadAttention(*(sizes or (8, 2)), batch_first=True, **options)), "attention")


def flax_attention(heads: int = 2, width: int = 8, **options: object) -> FlaxAttention:
    return evaluated(FlaxAttention(nnx.MultiHeadAttention(heads, width, rngs=rngs(), **options)))


def inputs(width: int = 8) -> list[torch.Tensor]:
    rng = random("attention inputs")
    return [torch.from_numpy(rng.standard_normal((2, 5, w)).astype(np.float32)) for w in (8, width, width)]


def outputs(source: TorchAttention, target: FlaxAttention) -> float:
    x = inputs()
    expected, actual = source(*x).detach().numpy(), np.asarray(target(*(jnp.asarray(one.numpy()) for one in x)))
    return float(np.abs(expected - actual).max())


def test_the_plan_names_the_blocks_and_the_arrays_lie_as_written_by_hand():
    source, target = torch_attention(), flax_attention()
    done = parity.transfer(source, target)
    assert [(e.source, e.target, e.layout) for e in done.plan if e.source != "mark"] == [
        *((f"layer.in_proj_weight[{n[0]}]", f"layer.{n}.kernel", "heads") for n in ("query", "key", "value")),
        *((f"layer.in_proj_bias[{n[0]}]", f"layer.{n}.bias", "heads") for n in ("query", "key", "value")),
        ("layer.out_proj.weight", "layer.out.kernel", "heads"),
        ("layer.out_proj.bias", "layer.out.bias", "as is"),
    ]
    weight, bias = source.layer.in_proj_weight.detach(), source.layer.in_proj_bias.detach()
    for number, part in enumerate((target.layer.query, target.layer.key, target.layer.value)):
        rows = slice(8 * number, 8 * number + 8)
        assert bits(part.kernel[...]) == bits(weight[rows].T.reshape(8, 2, 4))
        assert bits(part.bias[...]) == bits(bias[rows].reshape(2, 4))
    assert bits(target.layer.out.kernel[...]) == bits(source.layer.out_proj.weight.detach().T.reshape(2, 4, 8))
    assert outputs(source, target) < 1e-5


def wrong_kernel(name: str, target: FlaxAttention, weight: torch.Tensor) -> None:
    layer = target.layer
    if name == "no transpose":
        layer.query.kernel.set_value(jnp.asarray(weight[:8].numpy()).reshape(8, 2, 4))
    elif name == "heads minor":
        layer.query.kernel.set_value(jnp.asarray(weight[:8].T.reshape(8, 4, 2).transpose(1, 2).contiguous().numpy()))
    elif name == "interleaved":
        for number, part in enumerate((layer.query, layer.key, layer.value)):
            part.kernel.set_value(jnp.asarray(weight[number::3].T.contiguous().numpy()).reshape(8, 2, 4))
    elif name == "out not transposed":
        layer.out.kernel.set_value(layer.out.kernel[...].reshape(8, 8).T.reshape(2, 4, 8))
    else:
        layer.key.bias.set_value(jnp.zeros((2, 4)))


@pytest.mark.parametrize("name", ["no transpose", "heads minor", "interleaved", "out not transposed", "key bias dropped"])
def test_a_kernel_cut_wrongly_by_hand_is_found(name):
    source, target = torch_attention(), flax_attention()
    parity.transfer(source, target)
    wrong_kernel(name, target, source.layer.in_proj_weight.detach())
    report = parity.compare(source, target, *inputs(), levels=("weights",))
    assert levels(report) == {"weights": "failed"}
    # A key bias moves all scores of a query alike: no output shows it.
    assert (outputs(source, target) > 0.1) is (name != "key bias dropped")


class Written(nn.MultiheadAttention):
    """The same function in operations that can be proved exact."""

    def forward(self, x: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        )
        weights = (q @ k.transpose(-1, -2) / self.head_dim**0.5).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2)), None


def test_probes_and_gradients_see_the_blocks_of_one_array():
    source, target = randomised(TorchAttention(Written(8, 2, batch_first=True)), "written"), flax_attention()
    parity.transfer(source, target)
    chosen = ("weights", "wiring", "identical", "gradients")
    agree(source, target, inputs()[0], chosen=chosen)
    key, value = target.layer.key.kernel[...], target.layer.value.kernel[...]
    target.layer.key.kernel.set_value(value)
    target.layer.value.kernel.set_value(key)
    report = parity.compare(source, target, inputs()[0], levels=chosen)
    assert levels(report)["gradients"] == levels(report)["identical"] == levels(report)["weights"] == "failed"


def test_separate_projections_travel_whole():
    source, target = torch_attention(8, 2, kdim=6, vdim=6), flax_attention(in_kv_features=6)
    before = snapshot(source)
    plan = parity.transfer(source, target).plan
    assert [e.source for e in plan if "weight" in e.source][:3] == [f"layer.{n}_proj_weight" for n in "qkv"]
    assert snapshot(parity.transfer(target, torch_attention(8, 2, kdim=6, vdim=6)).value) == before


@pytest.mark.parametrize("form", ["module", "state"])
def test_a_module_fills_every_form_of_flax(form):
    source, target = torch_attention(), flax_attention()
    value = parity.transfer(source, nnx.state(target) if form == "state" else target).value
    back = randomised(torch_attention(), "back")
    parity.transfer(value, back)
    assert snapshot(back) == snapshot(source)


def test_a_rename_of_the_layer_reaches_its_blocks():
    source = randomised(nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, batch_first=True)}), "renamed")
    target = nnx.Dict(attention=nnx.MultiHeadAttention(2, 8, rngs=rngs()))
    assert parity.transfer(source, target, rename={"attn": "attention"}).passed
    back = randomised(nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, batch_first=True)}), "back")
    parity.transfer(target, back, rename={"attn": "attention"})
    assert snapshot(back) == snapshot(source)


def test_an_array_of_the_same_name_in_a_module_of_the_users_own_stays_whole():
    class Own(nnx.Module):
        def __init__(self):
            self.in_proj_weight = nnx.Param(jnp.zeros((6, 2)))

    source = {"in_proj_weight": torch.arange(12.0).reshape(6, 2)}
    target = Own()
    parity.transfer(source, target)
    assert bits(target.in_proj_weight[...]) == bits(source["in_proj_weight"])


def test_a_shared_copy_falls_back_to_copies():
    source, target = torch_attention(), flax_attention()
    before = snapshot(source)
    plan = parity.transfer(source, target, copy=False).plan
    assert not any(entry.shared for entry in plan if "[" in entry.source)
    back = torch_attention()
    parity.transfer(target, back, copy=False)
    assert snapshot(back) == before


@pytest.mark.parametrize(
    ("torch_options", "flax_options", "sentence"),
    [
        (
            dict(add_bias_kv=True),
            dict(),
            "layer.bias_k has no counterpart: nnx.MultiHeadAttention adds no learned key and value",
        ),
        (dict(add_zero_attn=True), dict(), "add_zero_attn=True in torch, wanted False"),
        (
            dict(kdim=6, vdim=4),
            dict(in_kv_features=6),
            "kdim=6 and vdim=4 in torch, but nnx.MultiHeadAttention has one in_kv_feat",
        ),
        (dict(bias=False), dict(), r"layer.query.bias \(2, 4\) of the target gets nothing from the source"),
        (dict(), dict(use_bias=False), r"layer.in_proj_bias \(24,\) of the source has no counterpart in the target"),
    ],
)
def test_what_has_no_counterpart_is_refused(torch_options, flax_options, sentence):
    with pytest.raises(parity.TransferError, match=sentence):
        parity.transfer(torch_attention(8, 2, **torch_options), flax_attention(**flax_options))


@pytest.mark.parametrize(
    ("torch_options", "flax_options", "sentence"),
    [
        (
            dict(dropout=0.5),
            dict(dropout_rate=0.25, broadcast_dropout=False),
            "dropout=0.5 in torch, dropout_rate=0.25 in Flax",
        ),
        (dict(dropout=0.5), dict(dropout_rate=0.5), "broadcast_dropout=True in Flax draws one mask for the whole batch"),
    ],
)
def test_a_planted_setting_is_told(torch_options, flax_options, sentence):
    told = parity.transfer(torch_attention(8, 2, **torch_options), flax_attention(**flax_options)).settings
    assert len(told) == 1
    assert sentence in told[0]


def test_the_wrong_number_of_heads_is_told():
    # The shapes of the kernels tell it already where the heads have an axis of their own.
    done = parity.transfer(torch_attention(8, 4), flax_attention(2))
    assert "layer: num_heads=4 in torch, num_heads=2 in Flax; set num_heads=4" in done.settings


def test_a_layer_that_takes_the_batch_second_is_told():
    source = randomised(TorchAttention(nn.MultiheadAttention(8, 2)), "attention")
    told = parity.transfer(source, flax_attention()).settings
    assert len(told) == 1
    assert "batch_first=False in torch, wanted True: nnx.MultiHeadAttention takes (batch, length, width)" in told[0]
    assert outputs(source, flax_attention()) > 0.5


@pytest.mark.parametrize("layout", [HEADS_OUT, HEADS_IN, HEADS_BIAS])
def test_heads_split_and_join_bit_for_bit(layout):
    torch_shape, flax_shape = {
        HEADS_OUT: ((6, 5), (5, 2, 3)),
        HEADS_IN: ((5, 6), (2, 3, 5)),
        HEADS_BIAS: ((6,), (2, 3)),
    }[layout]
    found = layout.between(torch_shape, flax_shape)
    array = np.arange(np.prod(torch_shape)).reshape(torch_shape)
    assert found.shape(torch_shape) == found.apply(array).shape == flax_shape
    np.testing.assert_array_equal(found.inverse().apply(found.apply(array)), array)
    assert layout.between(torch_shape, flax_shape[::-1] if len(flax_shape) == 3 else (2, 4)) is None
    with pytest.raises(ValueError, match="layout heads is for shape"):
        found.shape((1, 1))
