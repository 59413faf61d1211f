"""Rows of the user's own: added, checked, refused, printed."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from rule_cases import rngs
from torch import nn
from transfer_helpers import snapshot

import parity
from parity import cli
from parity.weights import ledger, rules


class TorchScale(nn.Module):
    """Two factors in one array, an offset, and a count that Flax does not keep."""

    def __init__(self, width: int = 3, power: int = 2):
        super().__init__()
        self.factors, self.offset, self.power = nn.Parameter(torch.ones(2 * width, 1)), nn.Parameter(torch.zeros(width)), power
        self.register_buffer("calls", torch.tensor(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.factors[:, 0].chunk(2)
        return (x * left) ** self.power * right + self.offset


class FlaxScale(nnx.Module):
    def __init__(self, width: int = 3, exponent: int = 2):
        self.left, self.right = nnx.Param(jnp.ones((1, width))), nnx.Param(jnp.ones((1, width)))
        self.shift, self.exponent = nnx.Param(jnp.zeros(width)), exponent

    def __call__(self, x):
        return (x * self.left[0]) ** self.exponent * self.right[0] + self.shift[...]


ENTRIES = (
    parity.LeafRule("factors[l]", "left", parity.layouts.TRANSPOSED),
    parity.LeafRule("factors[r]", "right", parity.layouts.TRANSPOSED),
    parity.LeafRule("offset", "shift"),
    parity.Alone("calls", "nobody reads it"),
    parity.Agree("power", "exponent"),
)


@pytest.fixture(autouse=True)
def own_ledger(monkeypatch):
    mine = list(rules.RULES)
    monkeypatch.setattr(rules, "RULES", mine)
    monkeypatch.setattr(ledger, "RULES", mine)


def x() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32))


def test_a_row_serves_transfer_check_and_compare():
    row = parity.add_rule(TorchScale, FlaxScale, *ENTRIES)
    assert parity.rules()[-1] is row
    assert row.torch == f"{__name__}.TorchScale"
    source, target = TorchScale(), FlaxScale()
    before = snapshot(source), snapshot(target)
    found = parity.check_rule(source, target, x())
    assert found.passed, str(found)
    assert str(found).startswith(f"{__name__}.TorchScale <-> {__name__}.FlaxScale: 3 arrays there and back bit for bit")
    assert found.to_dict()["passed"] is True
    found.raise_for_divergence()
    assert (snapshot(source), snapshot(target)) == before
    assert parity.transfer(source, target).alone == ("calls is left out: nobody reads it",)


def test_a_row_may_tell_something_and_name_what_is_zero():
    remark = parity.Remark("power", lambda torch, flax: [f"raised to {torch('power')}"])
    entries = (*ENTRIES[:2], parity.LeafRule("offset", "shift", zero_if=("power", 3)), *ENTRIES[3:], remark)
    row = parity.add_rule(TorchScale, FlaxScale, *entries)
    assert "power" in row.to_dict()["settings"]
    assert [entry["zero_if"] for entry in row.to_dict()["arrays"]] == [None, None, ("power", 3)]
    done = parity.transfer(TorchScale(), FlaxScale())
    assert done.passed
    assert done.alone == ("calls is left out: nobody reads it", "the model: raised to 2")
    source, target = TorchScale(power=3), FlaxScale(exponent=3)
    del source.offset
    target.shift.set_value(jnp.ones(3))
    assert any(sentence.startswith("shift is filled with zeros") for sentence in parity.transfer(source, target).alone)
    assert not target.shift[...].any()


@pytest.mark.parametrize(
    ("entries", "flax_layer", "sentence"),
    [
        (ENTRIES[:2] + ENTRIES[3:], FlaxScale(), r"offset \(3,\) of the source has no counterpart"),
        ((*ENTRIES[1:], parity.LeafRule("factors[l]", "left")), FlaxScale(), r"has shape \(3, 1\), so left must have \(3, 1\)"),
        (ENTRIES, FlaxScale(exponent=3), "power=2 in torch, exponent=3 in Flax; set exponent=2"),
    ],
)
def test_a_wrong_row_is_found(entries, flax_layer, sentence):
    parity.add_rule(TorchScale, FlaxScale, *entries)
    found = parity.check_rule(TorchScale(), flax_layer, x())
    assert not found.passed
    with pytest.raises(parity.DivergenceError, match=sentence):
        found.raise_for_divergence()


def test_a_row_that_exchanges_two_arrays_is_found_by_an_input_alone():
    left, right, *rest = ENTRIES
    exchanged = (parity.LeafRule(left.torch, "right", left.layout), parity.LeafRule(right.torch, "left", right.layout), *rest)
    parity.add_rule(TorchScale, FlaxScale, *exchanged)
    assert parity.check_rule(TorchScale(), FlaxScale()).passed
    found = parity.check_rule(TorchScale(), FlaxScale(), x())
    assert not found.passed
    assert "NOT the same function" in str(found)


def test_a_row_that_does_not_bring_everything_back_is_found(monkeypatch):
    parity.add_rule(TorchScale, FlaxScale, *ENTRIES)
    flipped = parity.layouts.Flipped
    monkeypatch.setattr(parity.layouts.Layout, "inverse", lambda self: flipped(self.name, self.axes or (0,), (0,)))
    found = parity.check_rule(TorchScale(), FlaxScale())
    assert "factors came back otherwise" in str(found)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((nn.Linear, nnx.Linear), "there is a row for torch.nn.Linear and flax.nnx.Linear already"),
        ((TorchScale, FlaxScale, "weight"), "'weight' is no LeafRule, Alone, Agree, Require, Check or Remark"),
        ((TorchScale, FlaxScale, ENTRIES[2], ENTRIES[2]), "offset -> shift stands there twice"),
        ((TorchScale, FlaxScale, ENTRIES[2], parity.Alone("offset", "")), "offset has a counterpart and has none"),
        ((TorchScale(), FlaxScale), "a layer is named by its class or its dotted name"),
        (("Linear", FlaxScale), "a layer is named by its class or its dotted name, got 'Linear'"),
    ],
)
def test_a_row_that_cannot_be_meant_is_refused(arguments, sentence):
    count = len(parity.rules())
    with pytest.raises(parity.InputError, match=sentence):
        parity.add_rule(*arguments)
    assert len(parity.rules()) == count


def test_check_rule_says_what_it_takes():
    with pytest.raises(parity.InputError, match=r"no row for .*TorchScale and .*FlaxScale; make one by parity.add_rule"):
        parity.check_rule(TorchScale(), FlaxScale())
    with pytest.raises(parity.InputError, match=r"takes a torch.nn.Module and a flax.nnx.Module or a parity.Linen, got"):
        parity.check_rule(FlaxScale(), TorchScale())


def test_the_packages_own_rows_pass_the_same_check():
    conv = nnx.Conv(2, 3, (3,), padding="VALID", rngs=rngs())
    assert parity.check_rule(nn.Conv1d(2, 3, 3), conv).passed


def test_the_command_prints_every_row(monkeypatch, capsys):
    for options in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["parity", "rules", *options])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out = capsys.readouterr().out
        assert stopped.value.code == 0
        if options:
            told = json.loads(out)
            assert (told["kind"], told["schema"], told["hints"]) == ("rules", 1, [])
            assert [(row["torch"], row["flax"]) for row in told["rules"]] == [(r.torch, r.flax) for r in parity.rules()]
        else:
            for rule in parity.rules():
                assert f"{rule.torch} <-> {rule.flax}" in out
            assert "in_proj_weight[q]" in out
            assert "agree: stride, strides; padding, padding_mode, padding in numbers" in out
