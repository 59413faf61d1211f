"""Notes on inputs and parameters that cannot show a fault: each fires on its own, and none on what is good."""

import math
from typing import Any

import jax
import numpy as np
import pytest
import torch
from evidence_pairs import FlaxTwo, TorchTwo, block, draw, normal, two
from flax import nnx
from torch import nn

import parity
from parity.evidence.lints import lint, lint_weights
from parity.evidence.notes import LINTS
from parity.evidence.subject import Subject
from parity.frameworks import load


class TorchTakes(nn.Module):
    """Takes up to four arguments, the last by the name of a mask."""

    def forward(self, x, y=None, ids=None, mask=None):
        return x


class FlaxTakes(nnx.Module):
    def __call__(self, x, y=None, ids=None, mask=None):
        return x


def found(*args: Any, **kwargs: Any) -> list[parity.Note]:
    return list(lint(Subject(TorchTakes().eval(), FlaxTakes(), args, kwargs, gradients=False), frozenset()))


GOOD = normal(3, 5, 8)
POSITIONS = (GOOD - GOOD.mean(-1, keepdims=True)) / GOOD.std(-1, keepdims=True)
MASK = np.arange(5) >= np.array([[5], [3], [2]])
IDS = np.array([[0, 3, 6, 1, 1], [1, 2, 2, 5, 6], [4, 4, 0, 3, 2]])
NAN = GOOD.copy()
NAN[1, 2, 3] = np.nan

# What is given, and the code, the place and a part of the sentence that are the only ones to come.
LINTED = {
    "empty": (lambda: found(GOOD[:0]), "empty", "args[0]", "is empty: nothing is computed"),
    "zeros": (lambda: found(GOOD, 0 * GOOD), "zeros", "args[1]", "as a query it attends evenly"),
    "constant": (lambda: found(np.full((3, 5, 8), 2.5, np.float32)), "constant", "args[0]", "is constant (2.5)"),
    "constant ids": (lambda: found_ids(IDS * 0 + 3), "constant", "kwargs['ids']", "(3)"),
    "signs": (lambda: found(np.sign(GOOD) / 2), "one-magnitude", "args[0]", "one magnitude (0.5)"),
    "whole": (lambda: found(np.round(4 * GOOD)), "whole-numbers", "args[0]", "bfloat16, TF32"),
    "normalised": (lambda: found(POSITIONS), "normalised", "args[0]", "nor its epsilon"),
    "nan": (lambda: found(NAN), "not-finite", "args[0]", "NaN or infinity at 1 of 120 places"),
    "denormal": (lambda: found(np.where(GOOD > 2, np.float32(1e-40), GOOD)), "denormal", "args[0]", "denormal numbers"),
    "batch of one": (lambda: found(GOOD[:1]), "batch-of-one", "args[0]", "mixed-up batch entries"),
    "single token": (lambda: found(GOOD[:, :1]), "single-token", "args[0]", "attention is 1 whatever its scores"),
    "single id": (lambda: found(GOOD, ids=IDS[:, :1]), None, "", ""),
    "single id that is looked up": (lambda: found_ids(IDS[:, :1]), "single-token", "kwargs['ids']", "single position"),
    "equal entries": (lambda: found(GOOD[:1].repeat(3, 0)), "equal-entries", "args[0]", "mixed-up entries"),
    "equal ids": (lambda: found_ids(IDS[:1].repeat(3, 0)), "equal-entries", "kwargs['ids']", "mixed-up entries"),
    "equal positions": (lambda: found(GOOD[:, :1].repeat(5, 1)), "equal-positions", "args[0]", "order, attention and masks"),
    "equal sizes": (lambda: found(normal(4, 4, 8)), "equal-sizes", "args[0]", "batch and length alike (4)"),
    "same object": (lambda: found(GOOD, GOOD), "same-arrays", "args[0]", "and args[1] hold the same"),
    "equal copies": (lambda: found(GOOD, GOOD.copy(), GOOD), "same-arrays", "args[0], args[1]", "and args[2] hold"),
    "wide": (lambda: found(GOOD, ids=IDS.astype(np.int64) + 2**20), "wide-integers", "kwargs['ids']", "is int64 up to 1048582"),
    "float mask": (lambda: found(GOOD, mask=MASK.astype(np.float32)), "float-mask", "kwargs['mask']", "some layers add such"),
    "mask of nothing": (lambda: found(GOOD, mask=MASK & False), "constant-mask", "kwargs['mask']", "one value (False)"),
    "mask of all": (lambda: found(GOOD, mask=MASK | True), "constant-mask", "kwargs['mask']", "one value (True)"),
    "added mask of nothing": (lambda: found(GOOD, mask=0 * GOOD[0]), "constant-mask", "kwargs['mask']", "one value (0.0)"),
    "denormal mask": (lambda: found(GOOD, mask=np.float32([[1e-40, 0, 2]])), "denormal", "kwargs['mask']", "turn the mask"),
    # What is good in spite of its look.
    "good": (lambda: found(GOOD, normal(3, 5, 8, name="other"), mask=MASK), None, "", ""),
    "good ids": (lambda: found_ids(IDS), None, "", ""),
    "image of one channel": (lambda: found(normal(3, 1, 6, 6)), None, "", ""),
    "scalars": (lambda: found(GOOD, np.float32(0) * np.ones((), np.float32), ids=np.array(5)), None, "", ""),
    "added mask": (lambda: found(GOOD, mask=np.where(MASK, -np.inf, 0).astype(np.float32)), None, "", ""),
    "narrow integers": (lambda: found(GOOD, ids=IDS.astype(np.int32) + 2**20), None, "", ""),
    "wide ids that are looked up": (lambda: found_ids(IDS + 2**20), None, "", ""),
}


def found_ids(ids: np.ndarray) -> list[parity.Note]:
    subject = Subject(TorchTakes().eval(), FlaxTakes(), (GOOD,), {"ids": ids}, gradients=False)
    return list(lint(subject, frozenset(("kwargs['ids']",))))


@pytest.mark.parametrize("name", LINTED)
def test_each_lint_comes_alone_and_says_in_one_line_what_cannot_be_shown(name):
    call, code, where, part = LINTED[name]
    notes = call()
    assert [note.code for note in notes] == ([code] if code else []), notes
    for note in notes:
        assert note.where == where and part in note.what and "\n" not in str(note) and note.lint
        assert str(note) == f"{where} {note.what}" and len(f"  note: {note}") <= 160


def test_64_bits_are_no_matter_where_jax_has_them():
    with jax.enable_x64(True):
        assert found(GOOD, ids=IDS.astype(np.int64) + 2**20) == []


class TorchNorms(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.norm, self.batch = nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)


def drawn() -> TorchNorms:
    model = draw(TorchNorms(), "norms")
    with torch.no_grad():
        model.batch.running_mean.copy_(torch.arange(4.0))
        model.batch.running_var.copy_(torch.arange(4.0) + 1)
    return model


WEIGHTS = {
    "zero bias": ("line.bias", 0.0, "zero-biases", "biases are zero"),
    "unit scale": ("norm.weight", 1.0, "plain-norms", "scales of norms are 1"),
    "norm's bias": ("batch.bias", 0.0, "plain-norms", "or biases 0"),
    "mean": ("batch.running_mean", 0.0, "initial-statistics", "running statistics are those of a new layer"),
    "variance": ("batch.running_var", 1.0, "initial-statistics", "running statistics"),
    "zero kernel": ("line.weight", 0.0, "constant-kernels", "one number throughout"),
    "equal kernel": ("line.weight", 0.3, "constant-kernels", "a transposed or permuted kernel"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_parameters_as_a_new_layer_has_them_are_told(name):
    path, value, code, part = WEIGHTS[name]
    model, leaves = drawn(), load("torch").leaves
    assert list(lint_weights(leaves(model))) == []
    model.state_dict()[path].fill_(value)
    [note] = lint_weights(leaves(model))
    assert (note.code, note.where, note.figures["paths"]) == (code, "", [path]) and part in note.what and path in note.what


def test_denormal_parameters_are_told_and_many_names_are_cut():
    model = drawn()
    model.state_dict()["line.weight"][0, 0] = 1e-40
    [note] = lint_weights(load("torch").leaves(model))
    assert note.code == "denormal" and "line.weight" in note.what
    many = nn.Sequential(*(nn.LayerNorm(3) for _ in range(4)))
    [note] = lint_weights(load("torch").leaves(many))
    assert note.what.endswith(": 0.weight, 0.bias, 1.weight, 1.bias and 4 more") and len(note.figures["paths"]) == 8


def test_every_lint_of_the_table_was_fired():
    fired = {code for _, code, *_ in LINTED.values()} | {code for *_, code, _ in WEIGHTS.values()}
    assert fired - {None} == set(LINTS)


def test_notes_reach_text_and_json_and_turn_no_verdict():
    report = parity.compare(*two(), np.ones((1, 4), np.float32), levels="structure")
    assert report.passed
    assert [note["code"] for note in report.to_dict()["notes"]] == ["constant", "batch-of-one"]
    assert "  note: args[0] is constant (1.0): a wrong scale, order or axis may not show" in str(report).splitlines()


# ------------------------------------------------------------------------------ ids out of range


class TorchIds(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, x, ids):
        return self.out(self.table(ids) + x)


class FlaxIds(nnx.Module):
    def __init__(self, *, rngs):
        self.table, self.out = nnx.Embed(7, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x, ids):
        return self.out(self.table(ids) + x)


@pytest.mark.parametrize(("moved", "reach"), [(1, "from 1 to 7"), (-1, "from -1 to 5")])
def test_ids_beyond_their_table_are_refused_before_anything_is_compared(moved, reach):
    torch_model, flax_model = draw(TorchIds(), "ids"), FlaxIds(rngs=nnx.Rngs(0))
    parity.transfer(torch_model, flax_model)
    x = normal(3, 5, 4)
    assert parity.compare(torch_model, flax_model, x, IDS, levels="structure").passed
    with pytest.raises(parity.InputError) as caught:
        parity.compare(torch_model, flax_model, x, IDS + moved, levels="structure")
    assert caught.value.code == "ids out of range"
    for part in (f"args[1] holds ids {reach}, and table.weight of the torch model has rows 0 to 6", "give ids below 7"):
        assert part in str(caught.value)


class TorchPlaces(TorchTwo):
    """Looks up rows that no argument names."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 4)

    def forward(self, x, ids):
        return super().forward(x) + self.table(torch.arange(x.shape[0]))


class FlaxPlaces(FlaxTwo):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.table = nnx.Embed(2, 4, rngs=rngs)

    def __call__(self, x, ids):
        return super().__call__(x) + self.table(np.arange(x.shape[0]))


def test_rows_that_a_model_asks_for_itself_are_its_own_error():
    report = parity.compare(*two(FlaxPlaces, TorchPlaces), normal(3, 4), np.array([9, 1, 2]), levels="structure")
    assert report.verdict == "one side raises" and report.level("structure").figures["raises"] == "torch"


def test_a_new_models_parameters_are_noted_by_compare():
    torch_model, flax_model = block()
    nn.init.ones_(torch_model.norm.weight)
    parity.transfer(torch_model, flax_model)
    report = parity.compare(torch_model, flax_model, normal(3, 5, 8), levels="structure")
    assert [str(note) for note in report.notes] == [
        "scales of norms are 1 (or biases 0), as in a new layer: a scale or bias that is left out or swapped does not show: "
        "norm.weight"
    ]
    assert math.isclose(torch_model.norm.weight.sum().item(), 8)
