"""Recurrent cells and layers: gates, one bias for two, and what a GRU of Flax has no place for."""

import numpy as np
import pytest
import torch
from flax import nnx
from helpers import random
from rule_cases import FlaxState, TorchState, agree, levels, randomised, rngs
from torch import nn
from transfer_helpers import bits, snapshot

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


# ---------------------------------------------------------------- several layers, both directions


class Outputs(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.rnn = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class FlaxOutputs(nnx.Module):
    def __init__(self, layers: list[nnx.Module]):
        self.rnn = nnx.List(layers)

    def __call__(self, x):
        for layer in self.rnn:
            x = layer(x)
        return x


def both_ways(width: int, cell: type = nnx.GRUCell, **options: object) -> nnx.Bidirectional:
    return nnx.Bidirectional(*(nnx.RNN(cell(width, 4, rngs=rngs())) for _ in range(2)), **options)


def stack(**options: object) -> tuple[Outputs, FlaxOutputs]:
    """Two layers, both directions, both as wide as the inputs: no shape tells one from another."""
    source = randomised(Outputs(nn.GRU(8, 4, 2, batch_first=True, bidirectional=True, **options)), "stack")
    return source, FlaxOutputs([both_ways(8), both_ways(8)])


def sequence() -> torch.Tensor:
    return torch.from_numpy(random("sequence").standard_normal((2, 5, 8)).astype(np.float32))


def exchange(*names: str):
    """Exchange two arrays of the Flax model, by dotted names."""

    def change(target: FlaxOutputs) -> None:
        variables = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(target, nnx.Param))}
        first, second = (variables[name] for name in names)
        values = first[...], second[...]
        first.set_value(values[1])
        second.set_value(values[0])

    return change


def turn_gates(target: FlaxOutputs) -> None:
    """Reset and update gate exchanged, as where gates are taken in another order."""
    kernel = target.rnn[1].forward_rnn.cell.dense_i.kernel
    kernel.set_value(kernel[...][:, [*range(4, 8), *range(4), *range(8, 12)]])


FAULTS = {
    "gate order": (turn_gates, "rnn.weight_ih_l1"),
    "directions": (
        exchange("rnn.0.forward_rnn.cell.dense_i.kernel", "rnn.0.backward_rnn.cell.dense_i.kernel"),
        "rnn.weight_ih_l0",
    ),
    "layers": (
        exchange("rnn.0.backward_rnn.cell.dense_h.kernel", "rnn.1.backward_rnn.cell.dense_h.kernel"),
        "rnn.weight_hh_l0_re",
    ),
    "bias ignored": (
        lambda target: target.rnn[1].backward_rnn.cell.dense_i.bias.set_value(np.zeros(12, np.float32)),
        "rnn.bias_ih_l1_reverse",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_stack_is_found_at_its_array(name):
    source, target = stack()
    done = parity.transfer(source, target)
    assert done.passed, done.settings
    assert {entry.source for entry in done.plan} == {p for p, _ in source.named_parameters() if "bias_hh" not in p}
    if name == "gate order":
        agree(source, target, sequence())
    FAULTS[name][0](target)
    report = parity.compare(source, target, sequence(), levels=("weights", "identical"))
    assert levels(report) == {"weights": "failed", "identical": "failed"}
    assert FAULTS[name][1] in str(report)


def test_a_layer_without_biases_fills_those_of_flax_and_wants_them_0_on_the_way_back():
    source, target = stack(bias=False)
    with torch.no_grad():
        exchange("rnn.0.forward_rnn.cell.dense_i.bias", "rnn.1.forward_rnn.cell.dense_i.bias")(target)
    bias = target.rnn[0].forward_rnn.cell.dense_i.bias
    bias.set_value(bias[...] + 1)
    done = parity.transfer(source, target)
    assert done.passed
    assert "rnn.0.forward_rnn.cell.dense_i.bias is filled with zeros: torch.nn.GRU has bias=False here" in done.alone[0]
    assert not bias[...].any()
    agree(source, target, sequence())
    back = stack(bias=False)[0]
    parity.transfer(target, back)
    assert snapshot(back) == snapshot(source)
    bias.set_value(bias[...] + 1)
    with pytest.raises(parity.TransferError, match=r"rnn.0.forward_rnn.cell.dense_i.bias has no counterpart and is not all 0"):
        parity.transfer(target, back)
    # A tree does not say that its layer is to have none.
    with pytest.raises(parity.TransferError, match=r"dense_i.bias \(12,\) of the target gets nothing from the source"):
        parity.transfer(source.state_dict(), target)


def test_a_stack_under_another_name_is_reached_by_a_rename():
    source, target = stack()
    before = snapshot(source)
    renamed = nnx.Dict(encoder=target.rnn)
    parity.transfer(source, renamed, rename={"rnn": "encoder"})
    back = stack()[0]
    parity.transfer(renamed, back, rename={"rnn": "encoder"})
    assert snapshot(back) == before


def test_a_state_of_flax_is_filled_too():
    source, target = stack()
    state = parity.transfer(source, nnx.state(target)).value
    back = stack()[0]
    parity.transfer(state, back)
    assert snapshot(back) == snapshot(source)


@pytest.mark.parametrize(
    ("torch_layer", "flax_layer", "sentence"),
    [
        (
            nn.GRU(3, 4, 2, bidirectional=True),
            both_ways(3),
            "num_layers=2 in torch, wanted 1: nnx.Bidirectional runs",
        ),
        (nn.GRU(3, 4), both_ways(3), "bidirectional=False in torch, wanted True: nnx.Bidirectional runs both ways"),
        (
            nn.LSTM(3, 4, proj_size=2, bidirectional=True),
            both_ways(3, nnx.LSTMCell),
            "proj_size=2 in torch, wanted 0: the cells of Flax project no output",
        ),
        (
            nn.GRU(3, 4, 2),
            nnx.List([nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs()))]),
            "rnn.weight_ih_l1 .* of the source has no counterpart",
        ),
    ],
)
def test_a_stack_that_does_not_fit_is_refused(torch_layer, flax_layer, sentence):
    source, target = randomised(Outputs(torch_layer), "refused"), nnx.Dict(rnn=flax_layer)
    with pytest.raises(parity.TransferError, match=sentence):
        parity.transfer(source, target)


@pytest.mark.parametrize(
    ("torch_options", "flax_options", "sentence"),
    [
        (dict(batch_first=False), dict(), "rnn: batch_first=False in torch, time_major=False in Flax; set time_major=True"),
        (
            dict(batch_first=True),
            dict(merge_fn=np.add),
            "merge_fn=add in Flax, torch joins both directions along",
        ),
    ],
)
def test_a_planted_setting_of_both_directions_is_told(torch_options, flax_options, sentence):
    source = randomised(Outputs(nn.GRU(3, 4, bidirectional=True, **torch_options)), "planted")
    target = nnx.Dict(rnn=both_ways(3, **flax_options))
    told = parity.transfer(source, target).settings
    assert len(told) == 1
    assert sentence in told[0]


def test_dropout_between_layers_is_told_of():
    one_way = randomised(Outputs(nn.GRU(4, 4, 2, batch_first=True, dropout=0.25)), "dropout")
    flax = FlaxOutputs([nnx.RNN(nnx.GRUCell(4, 4, rngs=rngs())) for _ in range(2)])
    for source, target in (stack(dropout=0.25), (one_way, flax)):
        done = parity.transfer(source, target)
        told = [sentence for sentence in done.alone if "dropout" in sentence]
        assert done.passed
        assert told == [
            "rnn.0: in training torch drops outputs of this layer (dropout=0.25); call an nnx.Dropout(0.25) behind it"
        ]
