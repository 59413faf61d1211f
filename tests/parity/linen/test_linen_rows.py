"""Every row of the ledger on Linen: the function is the same, and the way back gives every bit."""

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import linen as nn
from linen_layers import CASES, Case, pair_of
from rule_cases import agree, randomised
from transfer_helpers import snapshot

import parity
from parity.evidence import ladder
from parity.evidence.subject import Subject
from parity.weights.rules import LINEN, RULES

CONFIGURATIONS = [
    pytest.param(case, number, id=f"{case.id}-{number}") for case in CASES for number in range(case.configurations)
]


@pytest.mark.parametrize(("case", "number"), CONFIGURATIONS)
def test_a_layer_computes_the_same_after_transfer_and_travels_back_bit_for_bit(case: Case, number: int):
    source, empty, x = pair_of(case, number)
    before = snapshot(source)
    done = parity.transfer(source, empty)
    assert done.passed, done.settings
    assert {entry.decided_by for entry in done.plan if entry.source != "mark"} <= {"rule"}
    agree(source, done.value, *x)
    back = randomised(pair_of(case, number)[0], "another")
    untouched = {path for path in before if snapshot(back)[path] == before[path]}
    assert all(path.endswith("num_batches_tracked") or "bias_hh" in path for path in untouched)
    assert parity.transfer(done.value, back).passed
    assert snapshot(back) == before


# One of each kind: what a row says holds for gradients as it does for outputs.
KINDS = ("Linear", "LayerNorm", "Conv2d", "ConvTranspose2d", "BatchNorm2d", "GroupNorm", "PReLU", "GRUCell", "LSTMCell")
WITH_GRADIENTS = [case for case in CASES if case.id in KINDS]


@pytest.mark.parametrize("case", WITH_GRADIENTS, ids=lambda case: case.id)
def test_gradients_agree_too(case: Case):
    source, empty, x = pair_of(case, 0)
    # In float64: how many roundings a fused cell of torch saves in float32 is not the row's business.
    subject = Subject(source, parity.transfer(source, empty).value, x, {}, native_gradients=False)
    assert ladder.gradients(subject).status == "passed", ladder.gradients(subject)


def test_every_class_of_linen_in_the_ledger_has_a_case():
    with_linen = {rule.torch for rule in RULES if rule.linen or rule.flax.startswith("flax.linen.")}
    # Whole-number inputs and no arrays: these two have tests of their own.
    assert with_linen - {case.rule for case in CASES} == {"torch.nn.Embedding", "torch.nn.Dropout"}
    assert set(LINEN) <= {rule.flax for rule in RULES}


def test_the_table_of_rows_names_both_classes_of_flax():
    row = next(rule for rule in parity.rules() if rule.torch == "torch.nn.Linear")
    assert (row.flax, row.linen) == ("flax.nnx.Linear", "flax.linen.Dense")
    assert row.to_dict()["linen"] == "flax.linen.Dense"


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_a_cell_without_biases_fills_those_of_linen_and_wants_them_0_on_the_way_back(kind: str):
    cls = {"GRU": nn.GRUCell, "LSTM": nn.OptimizedLSTMCell, "RNN": nn.SimpleCell}[kind]
    source, state = getattr(torch.nn, f"{kind}Cell")(3, 4, bias=False), jnp.zeros((2, 4))
    linen = parity.Linen(cls(4), None, (state, state) if kind == "LSTM" else state, jnp.zeros((2, 3)))
    done = parity.transfer(source, linen)
    filled = [leaf for path, leaf in jax.tree.leaves_with_path(done.value.variables) if "bias" in jax.tree_util.keystr(path)]
    assert filled and not any(leaf.any() for leaf in filled)
    assert any("is filled with zeros" in sentence and "bias=False" in sentence for sentence in done.alone)
    back = getattr(torch.nn, f"{kind}Cell")(3, 4, bias=False)
    parity.transfer(done.value, back)
    assert snapshot(back) == snapshot(source)
    ones = jax.tree.map(lambda leaf: leaf + (leaf.ndim == 1), done.value.variables)
    with pytest.raises(parity.TransferError, match=r"bias has no counterpart and is not all 0"):
        parity.transfer(done.value.replaced(variables=ones), back)


def test_the_size_of_a_group_is_compared_where_no_array_tells_their_number():
    x, plain = jnp.zeros((2, 5, 6)), dict(use_bias=False, use_scale=False, use_fast_variance=False, epsilon=1e-5)
    source = torch.nn.ModuleDict(dict(norm=torch.nn.GroupNorm(2, 6, affine=False), linear=torch.nn.Linear(6, 4)))

    def told(size: int) -> tuple[str, ...]:
        layers = dict(norm=nn.GroupNorm(num_groups=None, group_size=size, **plain), linear=nn.Dense(4))
        return parity.transfer(source, parity.Linen(Both(**layers), None, x)).settings

    assert told(3) == ()
    assert told(2) == ("norm: num_groups=2 in torch, group_size=2 in Flax; set group_size=3",)


class Both(nn.Module):
    norm: nn.Module
    linear: nn.Module

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.norm(x))
