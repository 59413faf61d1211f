"""Every leaf layer in random configurations: the function is the same, and the way back gives every bit."""

import pytest
import torch
from rule_cases import CASES, Case, agree, pair_of, randomised
from transfer_helpers import snapshot

import parity
from parity.evidence import ladder
from parity.evidence.subject import Subject
from parity.weights.computed import WEIGHT_NORM

CONFIGURATIONS = [
    pytest.param(case, number, id=f"{case.id}-{number}") for case in CASES for number in range(case.configurations)
]


@pytest.mark.parametrize(("case", "number"), CONFIGURATIONS)
def test_a_layer_computes_the_same_after_transfer_and_travels_back_bit_for_bit(case: Case, number: int):
    source, target, x = pair_of(case, number)
    before = snapshot(source)
    done = parity.transfer(source, target)
    assert done.passed, done.settings
    assert {entry.decided_by for entry in done.plan if entry.source != "mark"} <= {"rule"}
    agree(source, target, *x)
    back = pair_of(case, number)[0]
    randomised(back, "another")
    assert {p for p in before if snapshot(back)[p] == before[p]} <= {
        p for p in before if p.endswith("num_batches_tracked") or "bias_hh" in p
    }
    assert parity.transfer(target, back).passed
    assert snapshot(back) == before


# Where gradients are wanted torch runs these by another kernel, with other last bits, which compare takes for chance.
WITH_GRADIENTS = [
    case for case in CASES if case.rule not in (*(f"torch.nn.{n}" for n in ("GRU", "RNN", "MultiheadAttention")), WEIGHT_NORM)
]


@pytest.mark.parametrize("case", WITH_GRADIENTS, ids=lambda case: case.id)
def test_gradients_agree_too(case: Case):
    source, target, x = pair_of(case, 0)
    parity.transfer(source, target)
    # In float64: how many roundings a fused cell of torch saves in float32 is not the row's business.
    subject = Subject(source, target, x, {}, native_gradients=False)
    assert ladder.gradients(subject).status == "passed", ladder.gradients(subject)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_state_dict_travels_as_the_module_does(case: Case):
    # Of a tree without biases nothing tells that none are wanted: the form has some in its first configuration.
    source, target, _ = pair_of(case, 0 if case.form else 1)
    before = snapshot(source)
    assert parity.transfer(source.state_dict(), target).passed
    fresh = {path: torch.zeros_like(t) if t.is_floating_point() else t.clone() for path, t in source.state_dict().items()}
    assert snapshot(parity.transfer(target, fresh).value) == before
