import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dropout_pairs import Drops, E, X, recorded
from safetensors.numpy import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import parity

EVERY_KIND = [
    ("d", "element", 0.3, (3, 5, 8)),
    ("lstm", "recurrent", 0.25, (3, 5, 4)),
    ("lstm", "recurrent", 0.25, (3, 5, 4)),
    ("gru", "recurrent", 0.25, (3, 5, 8)),
    ("attention", "attention", 0.15, (10, 3, 3)),
    ("", "element", 0.35, (3, 5, 8)),
    ("", "attention", 0.2, (3, 5, 5)),
    ("d1", "channels", 0.5, (3, 5, 1)),
    ("d2", "channels", 0.3, (3, 5, 1, 1)),
    ("d3", "channels", 0.3, (3, 5, 1, 1, 1)),
    ("fa", "alpha channels", 0.2, (3, 5, 1, 1, 1)),
    ("al", "alpha", 0.2, (3, 5, 8, 2, 4)),
    ("", "function", 0.2, (3, 1, 1, 1, 1)),
    ("", "function", 0.3, (5,)),
    ("d", "element", 0.3, (3, 5, 8, 2, 4)),
    ("again", "element", 0.4, (3, 5, 8, 2, 4)),
]


class EveryKind(nn.Module):
    def __init__(self):
        super().__init__()
        self.d, self.d1, self.d2, self.d3 = nn.Dropout(0.3), nn.Dropout1d(), nn.Dropout2d(0.3), nn.Dropout3d(0.3)
        self.al, self.fa = nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)
        self.lstm = nn.LSTM(8, 4, 3, dropout=0.25, batch_first=True)
        self.gru = nn.GRU(4, 4, 2, dropout=0.25, bidirectional=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.15)
        self.again = nn.Dropout(0.4, inplace=True)
        self.all, self.none = nn.Dropout(1.0), nn.Dropout(0.0)

    def forward(self, x):
        y = self.gru(self.lstm(self.d(x))[0])[0]
        y = self.attention(y, y, y)[0]
        y = F.dropout(y, 0.35)
        y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.2)
        z = y[:, :, :, None, None] * torch.ones(2, 4, dtype=y.dtype)
        z = self.d1(z[..., 0, 0]).sum() + self.d2(z[..., 0]).sum() + self.d3(z) + self.fa(z) + self.al(z)
        path = torch.empty(3, 1, 1, 1, 1, dtype=y.dtype).bernoulli_(0.8).div_(0.8)
        rows = torch.bernoulli(torch.full((5,), 0.7))
        return self.again(self.d(z * path + self.none(z))) + rows.sum(), self.all(z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_kind_of_drop_is_seen_and_can_be_run_again(dtype):
    model, x = EveryKind().to(dtype), torch.from_numpy(X).to(dtype)
    before = torch.get_rng_state()
    with parity.record_dropout(model) as masks:
        expected = model(x)
    assert [(d.path, d.kind, pytest.approx(d.rate), d.shape) for d in masks.drops] == EVERY_KIND
    assert [d.call for d in masks.drops if d.path == "d"] == [0, 1]
    with parity.replay_dropout(model, masks):
        again = model(x)
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    # The record changes nothing: the same random numbers give the same run without it.
    torch.set_rng_state(before)
    assert all(torch.equal(a, b) for a, b in zip(expected, model(x), strict=True))


def test_what_a_drop_multiplies_by():
    masks, _ = recorded(EveryKind(), X)
    found = {(d.kind, d.path): d.scale for d in masks.drops}
    assert found["element", "d"] == pytest.approx(1 / 0.7) and found["attention", "attention"] == pytest.approx(1 / 0.85)
    assert found["alpha", "al"] is None
    assert [d.scale for d in masks.drops if d.kind == "function"] == [pytest.approx(1.25), None]


def test_masks_are_those_of_the_run_in_the_layout_of_what_the_module_returns():
    model = nn.Dropout(0.4)
    masks, y = recorded(model, X)
    assert np.array_equal(masks.drops[0].mask, y != 0)
    # torch draws between recurrent layers time first, whatever the module takes.
    shapes = {}
    for batch_first in (True, False):
        model = nn.LSTM(8, 4, 2, dropout=0.5, batch_first=batch_first)
        torch.manual_seed(0)
        masks, _ = recorded(model, X if batch_first else np.ascontiguousarray(X.swapaxes(0, 1)))
        shapes[batch_first] = masks.drops[0].mask
    assert np.array_equal(shapes[True], shapes[False].swapaxes(0, 1)) and shapes[True].shape == (3, 5, 4)


def test_eval_mode_and_empty_inputs_draw_nothing():
    model = Drops()
    with parity.record_dropout(model) as masks:
        model(torch.zeros(0, 5, 8))
        model.eval()(torch.from_numpy(X))
    assert len(masks) == 0 and masks.plan == () and masks.arrays() == {}


def test_activation_checkpointing():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.drop = nn.Linear(E, E), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(checkpoint(lambda x: self.drop(self.linear(x)).tanh(), x, use_reentrant=False))

    model = Checkpointed()
    with parity.record_dropout(model) as masks:
        model(torch.from_numpy(X)).sum().backward()
    # The second time, in the backward pass, is the same drop.
    assert [(d.path, d.call) for d in masks.drops] == [("drop", 0), ("drop", 1)]
    message = "drop drops inside torch.utils.checkpoint.*; turn activation checkpointing off meanwhile"
    with pytest.raises(parity.DivergenceError, match=message), parity.replay_dropout(model, masks):
        model(torch.from_numpy(X))


class Rates(nn.Module):
    def forward(self, x):
        return x * torch.bernoulli(torch.rand(E, generator=torch.Generator().manual_seed(0)))


def test_what_cannot_be_recorded_is_refused():
    model = nn.Sequential(nn.RReLU(), Rates())
    with pytest.raises(parity.InputError) as error:
        recorded(model, X)
    text = str(error.value)
    assert "the run cannot be replayed: 3 problems" in text
    assert "0 draws random numbers by aten.rrelu_with_noise, which are no dropout mask; use nn.LeakyReLU" in text
    assert "1 draws random numbers by aten.rand" in text and "1 keeps its elements with 8 different probabilities" in text
    compiled = nn.Sequential(type("OptimizedModule", (nn.Module,), {})())
    with pytest.raises(parity.InputError, match=r"^0 is compiled by torch.jit or torch.compile.*give the module"):
        recorded(compiled, X)


def test_hooks_are_gone_after_an_error():
    model = Drops()
    with pytest.raises(TypeError), parity.record_dropout(model):
        model(None)
    masks, _ = recorded(model, X)
    assert [(d.path, d.call) for d in masks.drops] == [("a", 0), ("b", 0)]
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks


def test_a_file_holds_all_of_it(tmp_path):
    masks, _ = recorded(EveryKind(), X)
    masks.save(file := tmp_path / "masks.safetensors")
    read = parity.DropoutMasks.load(file)
    assert read.plan == masks.plan and read.modules == masks.modules and read.source == "torch"
    assert all(np.array_equal(a.mask, b.mask) for a, b in zip(read.drops, masks.drops, strict=True))
    assert str(read) == str(masks) and "16 drops" in repr(read) and hash(read.plan) == hash(masks.plan)
    assert [p.name for p in tmp_path.iterdir()] == ["masks.safetensors"]
    arrays = masks.arrays()
    assert [len(arrays[path]) for path in ("d", "lstm", "")] == [2, 2, 4] and arrays["d"][0].dtype == bool


def test_damaged_files(tmp_path):
    masks, _ = recorded(Drops(), X)
    masks.save(file := tmp_path / "masks.safetensors")
    header = {"format": "parity dropout masks 1"}
    text = {"source": "torch", "modules": {}, "convolutional": False, "drops": [["a", 0, "element", 0.5, 2.0, [3, 5]]]}
    bits = {"0": np.zeros(1, np.uint8), "1": np.zeros(1, np.uint8)}
    told = header | {"masks": json.dumps(text)}
    cases = {
        "cannot be read as dropout masks": lambda: file.write_bytes(file.read_bytes()[:50]),
        "says it holds None, expected 'parity dropout": lambda: save_file({"a": np.ones(3)}, file),
        "is damaged: JSONDecodeError": lambda: save_file(bits, file, header | {"masks": "{"}),
        "is damaged: KeyError: '0'": lambda: save_file({"2": bits["0"]}, file, told),
        "2 problems\n  - mask 0 has .* in place of 2 bytes": lambda: save_file(
            bits, file, header | {"masks": json.dumps(text)}
        ),
    }
    assert set(load_file(file)) == {"0", "1"}
    for message, spoil in cases.items():
        spoil()
        with pytest.raises(parity.InputError, match=message):
            parity.DropoutMasks.load(file)
    with pytest.raises(parity.InputError, match="cannot be read"):
        parity.DropoutMasks.load(tmp_path / "none")
