"""Recurrent cells and layers: gates, one bias for two, and what a GRU of Flax has no place for."""

import numpy as np
import pytest
import torch
from flax import nnx
from helpers import random
from rule_cases import FlaxState, TorchState, agree, randomised, rngs
from torch import nn
from transfer_helpers import bits

import parity


def gru(bias: bool) -> TorchState:
    source = randomised(TorchState(nn.GRUCell(3, 4)), "gru")
    if bias:
        with torch.no_grad():
            source.layer.bias_hh.copy_(torch.arange(1.0, 13.0) / 8)
    return source


def flax_gru() -> FlaxState:
    return FlaxState(nnx.GRUCell(3, 4, rngs=rngs()))


def inputs() -> list[torch.Tensor]:
    rng = random("gru")
    return [torch.from_numpy(rng.standard_normal((2, width)).astype(np.float32)) for width in (3, 4)]


def test_a_gru_with_a_bias_inside_the_reset_gate_is_refused_and_says_what_would_be_lost():
    source, target = gru(True), flax_gru()
    with pytest.raises(
        parity.TransferError, match=r"layer.bias_hh has no counterpart: nnx.GRUCell has no bias inside the reset gate"
    ):
        parity.transfer(source, target)
    with pytest.raises(parity.TransferError, match=r"bias_hh has no counterpart: nnx.GRUCell"):
        parity.transfer({p.removeprefix("layer."): t for p, t in source.layer.state_dict().items()}, target.layer)
    report = parity.compare(source, target, *inputs(), levels=("weights",))
    assert "b_hn" in str(report)


def test_folding_the_first_two_gates_as_told_is_exact_and_folding_the_third_is_not():
    x, source, target = inputs(), gru(True), flax_gru()
    layer, wanted = source.layer, gru(True)(*inputs())[0]
    with torch.no_grad():
        layer.bias_ih[:8] += layer.bias_hh[:8]
        layer.bias_hh[:8] = 0
        assert float((source(*x)[0] - wanted).detach().abs().max()) < 1e-6
        layer.bias_ih[8:] += layer.bias_hh[8:]
        layer.bias_hh[8:] = 0
    assert float((source(*x)[0] - wanted).detach().abs().max()) > 1e-2
    parity.transfer(source, target)
    agree(source, target, *x)


def test_the_second_bias_is_told_of_and_comes_back_as_zeros():
    source, target = gru(False), flax_gru()
    done = parity.transfer(source, target)
    assert done.passed
    assert done.alone[0].startswith("layer.bias_hh is all 0 and left out: nnx.GRUCell has no bias inside the reset gate")
    back = gru(True)
    done = parity.transfer(target, back)
    assert done.alone[0].startswith("layer.bias_hh is filled with zeros: ")
    assert bits(back.layer.bias_hh) == bits(torch.zeros(12))
    assert bits(back.layer.bias_ih) == bits(source.layer.bias_ih)


@pytest.mark.parametrize(
    ("torch_layer", "flax_layer", "sentence"),
    [
        (
            nn.GRU(3, 4, num_layers=2),
            nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs())),
            "num_layers=2 in torch, wanted 1: nnx.RNN runs one layer",
        ),
        (
            nn.GRU(3, 4, bidirectional=True),
            nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs())),
            "bidirectional=True in torch, wanted False",
        ),
        (nn.LSTM(3, 4, proj_size=2), nnx.RNN(nnx.LSTMCell(3, 4, rngs=rngs())), "proj_size=2 in torch, wanted 0"),
    ],
)
def test_what_has_no_counterpart_is_refused(torch_layer, flax_layer, sentence):
    source = randomised(TorchState(torch_layer), "refused")
    with pytest.raises(parity.TransferError, match=sentence):
        parity.transfer(source, FlaxState(flax_layer))


@pytest.mark.parametrize(
    ("torch_layer", "flax_layer", "sentence"),
    [
        (
            nn.RNNCell(3, 4),
            nnx.SimpleCell(3, 4, activation_fn=nnx.relu, rngs=rngs()),
            "activation_fn is relu in Flax, tanh in torch",
        ),
        (nn.RNNCell(3, 4), nnx.SimpleCell(3, 4, residual=True, rngs=rngs()), "residual=True in Flax adds the state once more"),
        (nn.GRUCell(3, 4), nnx.GRUCell(3, 4, gate_fn=nnx.relu, rngs=rngs()), "gate_fn is relu in Flax, sigmoid in torch"),
        (
            nn.GRU(3, 4),
            nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs())),
            "batch_first=False in torch, time_major=False in Flax; set time_major=True",
        ),
        (
            nn.GRU(3, 4, batch_first=True),
            nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs()), reverse=True),
            "reverse=True in Flax runs backwards",
        ),
    ],
)
def test_a_planted_setting_is_told(torch_layer, flax_layer, sentence):
    source = randomised(TorchState(torch_layer), "planted")
    told = parity.transfer(source, FlaxState(flax_layer)).settings
    assert len(told) == 1
    assert sentence in told[0]
