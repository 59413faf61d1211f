"""Several recurrent layers of torch, in both directions, against a list of Linen's."""

import numpy as np
import pytest
import torch
from flax import linen as nn

import parity


class Both(nn.Module):
    """Two layers, each in both directions, in a list under the name of the torch layer."""

    def setup(self) -> None:
        self.rnn = [nn.Bidirectional(nn.RNN(nn.OptimizedLSTMCell(4)), nn.RNN(nn.OptimizedLSTMCell(4))) for _ in range(2)]

    def __call__(self, x):
        for layer in self.rnn:
            x = layer(x)
        return x


class TorchBoth(torch.nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.rnn = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True, bias=bias)

    def forward(self, x):
        return self.rnn(x)[0]


@pytest.mark.parametrize("bias", [False, True])
def test_two_layers_in_both_directions_travel_there_and_back(bias):
    torch.manual_seed(3)
    ours, x = TorchBoth(bias).eval(), np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    with torch.no_grad():
        for name, array in ours.named_parameters():
            if "bias_hh" in name:
                array.zero_()
    filled = parity.transfer(ours, parity.Linen(Both(), None, x)).value
    report = parity.compare(ours, filled, x, levels=("weights", "identical"))
    assert report.passed, report
    fresh = TorchBoth(bias)
    parity.transfer(filled, fresh)
    for name, array in ours.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], array), name


def test_exchanged_directions_are_seen():
    torch.manual_seed(3)
    ours, x = TorchBoth(False).eval(), np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    filled = parity.transfer(ours, parity.Linen(Both(), None, x)).value
    params = dict(filled.variables["params"])
    layer = params["rnn_1"]
    params["rnn_1"] = {"forward_rnn": layer["backward_rnn"], "backward_rnn": layer["forward_rnn"]}
    report = parity.compare(ours, parity.Linen(Both(), {"params": params}), x, levels=("weights", "identical"))
    assert {level.level: level.status for level in report.levels} == {"weights": "failed", "identical": "failed"}
