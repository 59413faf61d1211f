"""Every row of the ledger on Linen: the function is the same, and the way back gives every bit."""

import pytest
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
