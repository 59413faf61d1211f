"""`parity.probe_inputs`: what it makes sees faults, is in range, and draws no note of its own."""

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from evidence_pairs import block, normal
from flax import nnx
from torch import nn

import parity
from parity.evidence.inputs import MASKS, hidden_places
from parity.evidence.lints import lint_inputs
from parity.evidence.subject import Subject

WIDTH, WORDS, LONGEST = 8, 23, 12


class TorchReader(nn.Module):
    """Ids, positions behind a shift, a segment by name, values and a mask: every kind of argument."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST + 2, WIDTH)
        self.kinds = nn.Embedding(3, WIDTH)

    def forward(self, ids, extra, mask, *, segments):
        places = self.places(torch.arange(ids.shape[1]) + 2)
        x = self.words(ids) + places + self.kinds(segments + 1) + extra
        return x.masked_fill(mask[..., None], 0.0)


def rows(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, array.shape[-1]).astype(np.float64)


def by_name(sets: list[parity.InputSet]) -> dict[str, parity.InputSet]:
    return {one.name: one for one in sets}


SPECS = (
    ("batch", "length", WIDTH),
    parity.Ids(("batch", "length"), WORDS),
    parity.Mask(("batch", 1, 1, "length"), "true hides"),
)


def test_every_set_has_its_kind_of_numbers_and_sizes():
    sets = by_name(parity.probe_inputs(*SPECS))
    assert list(sets) == ["plain", "scales", "shifted", "low variance", "padding", "other sizes", "square"]
    shapes = {name: one.args[0].shape for name, one in sets.items()}
    assert {shapes[name] for name in ("plain", "scales", "shifted", "low variance", "padding")} == {(3, 5, WIDTH)}
    assert all(len(set(shapes[name])) == 3 for name in ("plain", "other sizes")) and shapes["other sizes"][0] != 3
    assert shapes["square"][0] == shapes["square"][1] != WIDTH
    assert all(min(one.args[0].shape) > 1 for one in sets.values())
    assert all(one.args[1].shape == one.args[0].shape[:2] for one in sets.values())
    assert all(one.args[2].shape == (one.args[0].shape[0], 1, 1, one.args[0].shape[1]) for one in sets.values())
    spread = {name: rows(one.args[0]).std(-1) for name, one in sets.items()}
    assert spread["scales"].max() / spread["scales"].min() > 100
    assert (spread["low variance"] < 3e-3).all()
    assert (np.abs(rows(sets["shifted"].args[0]).mean(-1)) > 50 * spread["shifted"]).all()
    assert "batch 3, length 5" in sets["plain"].shows and all(one.shows for one in sets.values())


def test_the_same_seed_makes_the_same_numbers_and_every_set_and_argument_others():
    one, same, other = (parity.probe_inputs(*SPECS, SPECS[0], seed=seed) for seed in (0, 0, 1))
    for a, b, c in zip(one, same, other, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a.args, b.args, strict=True))
        # Padding is the same for every seed: from the whole length down.
        equal = [np.array_equal(x, y) for x, y in zip(a.args, c.args, strict=True)]
        assert equal == [False, False, a.name == "padding", False]
        assert not np.array_equal(a.args[0], a.args[3])
    assert not np.array_equal(one[0].args[1], one[1].args[1])


@pytest.mark.parametrize("says", MASKS)
@pytest.mark.parametrize("shape", [("batch", "length"), ("batch", 1, "length", "length"), ("length",)])
def test_masks_hide_something_in_every_row_and_never_a_whole_one(says, shape):
    hides, shows = MASKS[says]
    for one in parity.probe_inputs(parity.Mask(shape, says), ("batch", "length", WIDTH), hidden_rows=True):
        mask = one.args[0]
        assert mask.dtype == (bool if says.startswith("true") else np.float32)
        hidden = rows(mask == np.asarray(hides, mask.dtype))
        assert np.array_equal(hidden.astype(bool), ~rows(mask == np.asarray(shows, mask.dtype)).astype(bool))
        whole = hidden.all(-1)
        assert whole.any() if one.name == "hidden rows" else not whole.any()
        if one.name == "padding":
            # Hidden at the end, and not the same of every entry.
            assert (np.diff(hidden) >= 0).all() and hidden.any()
            assert len(shape) == 1 or len({row.sum() for row in hidden}) > 1
        else:
            assert hidden.any(-1).all()


def test_two_masks_together_hide_no_row_whole():
    for one in parity.probe_inputs(
        parity.Mask(("length", "length"), "true hides"), parity.Mask(("batch", "length"), "true hides")
    ):
        assert not (one.args[0][None] | one.args[1][:, None]).all(-1).any()


@pytest.mark.parametrize("vocabulary", [2, 3, 40])
def test_ids_reach_both_ends_of_their_range(vocabulary):
    for one in parity.probe_inputs(parity.Ids(("batch", "length"), vocabulary)):
        ids = one.args[0]
        assert (ids.min(), ids.max()) == (0, vocabulary - 1) and ids.dtype == np.int32
        assert len(np.unique(ids)) < ids.size
        assert vocabulary == 2 or len(np.unique(ids)) > 2 or ids.size < 4


def reader_specs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = parity.Ids(("batch", "length")), ("batch", "length", WIDTH), parity.Mask(("batch", "length"), "true hides")
    return args, {"segments": parity.Ids(("batch", "length"))}


def test_the_vocabulary_is_that_of_the_table_that_looks_the_ids_up():
    model = TorchReader()
    args, kwargs = reader_specs()
    sets = parity.probe_inputs(*args, kwargs=kwargs, model=model, sizes={"length": (5, 7, LONGEST)})
    assert {int(one.args[0].max()) for one in sets} == {WORDS - 1}
    # The model adds 1 before it looks up one of 3 rows.
    assert {int(one.kwargs["segments"].max()) for one in sets} == {1}
    assert {one.args[0].shape[1] for one in sets} == {5, LONGEST}
    for one in sets:
        model(*map(torch.from_numpy, one.args), segments=torch.from_numpy(one.kwargs["segments"]))


def test_sizes_are_chosen_from_those_allowed():
    sets = by_name(parity.probe_inputs(("batch", 3, "height", "width"), sizes={"height": 32, "width": range(24, 33, 8)}))
    assert sets["plain"].args[0].shape == (5, 3, 32, 24)
    assert {one.args[0].shape[2] for one in sets.values()} == {32}
    assert "square" not in sets


@dataclass(frozen=True)
class Batch:
    x: Any
    factor: float = 2.0


@pytest.mark.parametrize("of", [np.asarray, torch.from_numpy, jnp.asarray])
def test_an_example_of_any_framework_gives_shapes_dtypes_and_ranges(of):
    image, ids, mask = np.abs(normal(3, 2, 4)) + 0.5, np.array([[7, 9], [8, 9], [7, 7]]), np.array([True, False])
    flag = np.float32(0.5)
    tree = {"x": of(image), "rest": [of(ids), (of(mask), Batch(of(normal(3, 5)))), "same", None, 3, True]}
    sets = parity.probe_inputs(tree, of(np.array(2.5, np.float32)), flag, masks="true shows")
    assert [one.name for one in sets] == ["plain", "scales", "shifted", "low variance", "padding"]
    for one in sets:
        got, scalar, same = one.args
        x, (other_ids, (other_mask, batch), *rest) = got["x"], got["rest"]
        assert (x.shape, x.dtype) == (image.shape, image.dtype) and (x >= 0).all() and not np.array_equal(x, image)
        assert other_ids.min() == 7 and other_ids.max() == 9 and str(other_ids.dtype) == str(of(ids).dtype).split(".")[-1]
        assert other_mask.dtype == bool and other_mask.any() and not other_mask.all()
        assert batch.x.shape == (3, 5) and (batch.x < 0).any() and batch.factor == 2.0
        assert rest == ["same", None, 3, True] and float(scalar) == 2.5 and same is flag


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_values_keep_their_dtype_and_rows_that_vary(dtype):
    wanted = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for one in parity.probe_inputs(normal(3, 5, WIDTH).astype(wanted)):
        assert one.args[0].dtype == wanted and np.isfinite(rows(one.args[0])).all()
        assert all(len(np.unique(row)) > 3 for row in rows(one.args[0]))
    model = nn.Linear(WIDTH, 3).to(getattr(torch, dtype))
    assert {str(one.args[0].dtype) for one in parity.probe_inputs(("batch", WIDTH), model=model)} == {dtype}


class FlaxReader(nnx.Module):
    def __call__(self, ids, extra, mask, *, segments):
        return extra


def test_no_note_is_made_of_inputs_that_see_faults():
    args, kwargs = reader_specs()
    model = TorchReader().eval()
    sets = parity.probe_inputs(*args, kwargs=kwargs, model=model, sizes={"length": (5, 7, LONGEST, 4)}, hidden_rows=True)
    assert len(sets) == 8
    for one in sets:
        subject = Subject(model, FlaxReader(), one.args, one.kwargs, ignore="*", gradients=False)
        found = [str(note) for note in lint_inputs(subject, frozenset(("args[0]", "kwargs['segments']")))]
        # One size for all is what that set is for.
        assert [note for note in found if not (one.name == "square" and "alike (4)" in note)] == []
        assert len(found) == (3 if one.name == "square" else 0)


def test_a_fault_that_plain_inputs_hide_is_found_and_the_set_named():
    torch_model, flax_model = block()
    flax_model.norm.use_fast_variance = True
    sets = parity.probe_inputs(("batch", "length", WIDTH))[:3]
    levels = ("structure", "native")
    plain = parity.compare(torch_model, flax_model, sets[0], levels=levels, modes="compiled")
    assert plain.passed and plain.inputs == "plain" and plain.sets == ()
    report = parity.compare(torch_model, flax_model, sets, levels=levels, modes="compiled", diagnose=False)
    assert not report.passed and report.inputs == "shifted"
    assert {one.name for one in report.sets if not one.passed} == {"shifted"}
    assert [(one.failed, one.verdict) for one in report.sets if one.name == "shifted"] == [(("native",), "differs")]
    text = str(report)
    assert text.startswith(
        "NOT the same function on the inputs 'shifted'\n  1 of 3 input sets fail: shifted; agreeing: plain, scales"
    )
    assert parity.trace(torch_model, flax_model, sets[2]).passed
    with pytest.raises(parity.InputError, match="give one of the 3 input sets: 'plain', 'scales', 'shifted'"):
        parity.trace(torch_model, flax_model, sets)
    data = report.to_dict()
    assert data["inputs"] == "shifted" and [one["name"] for one in data["sets"]] == [one.name for one in sets]


def test_agreement_on_all_sets_is_one_line_with_their_number_and_figures_of_all():
    sets = parity.probe_inputs(("batch", WIDTH), sizes={"batch": (3, 5)})
    report = parity.compare(*block(), sets, levels=("weights", "structure", "identical"))
    elements = sum(one.args[0].size for one in sets)
    assert report.passed and not report.notes
    assert (
        str(report) == f"the same function: weights, structure, identical ({elements} values identical, {len(sets)} input sets)"
    )
    assert report.level("identical").figures["elements"] == elements and len(report.sets) == len(sets)


def test_a_note_counts_for_several_sets_only_if_each_deserves_it():
    one, other = np.ones((2, WIDTH), np.float32), normal(2, WIDTH)
    sets = [parity.InputSet("a", "", (one,)), parity.InputSet("b", "", (other,)), parity.InputSet("c", "", (one,))]
    assert parity.compare(*block(), sets, levels="structure").notes == ()
    assert [n.code for n in parity.compare(*block(), [sets[0], sets[2]], levels="structure").notes] == ["constant"]


REFUSED = {
    "mask without a meaning": (lambda: parity.probe_inputs(np.array([True, False])), ["args[0] is a mask; state what it says"]),
    "unknown meaning": (
        lambda: parity.probe_inputs(np.array([True]), masks="hides"),
        ["masks must be one of 'true hides'", "got 'hides'"],
    ),
    "unknown meaning of a spec": (
        lambda: parity.probe_inputs(parity.Mask((3,), "hides")),
        ["args[0]: a mask says one of 'true hides'"],
    ),
    "no vocabulary": (lambda: parity.probe_inputs(parity.Ids(("n",))), ["nothing says how many ids args[0] may hold"]),
    "vocabulary of one": (
        lambda: parity.probe_inputs(parity.Ids(("n",), 1)),
        ["args[0]: a vocabulary must have at least 2 ids, got 1"],
    ),
    "ids that nothing looks up": (
        lambda: parity.probe_inputs(("n", 4), parity.Ids(("n",)), model=Adding()),
        ["the model looks up args[1] in no table", "parity.Ids(shape, vocabulary=...)"],
    ),
    "a model that does not run": (
        lambda: parity.probe_inputs(("n", 5), parity.Ids(("n",)), model=Adding()),
        ["the model does not run on these shapes: RuntimeError", "state the vocabulary"],
    ),
    "nothing": (lambda: parity.probe_inputs("x", 3), ["no argument is an array or a shape"]),
    "size zero": (lambda: parity.probe_inputs(("n", 0)), ["args[0] has sizes 0; a size is a whole number from 1, or a name"]),
    "several": (
        lambda: parity.probe_inputs((0, 2), parity.Values((3,), "int8"), sizes={"n": 3}),
        ["3 problems", "args[0] has sizes 0", "args[1]: values are float64", "sizes names 'n'; the open sizes are: none"],
    ),
    "sizes": (lambda: parity.probe_inputs(("n", 2), sizes={"n": []}), ["sizes['n'] must be a whole number from 1", "got []"]),
    "complex": (lambda: parity.probe_inputs(np.ones(3, complex)), ["args[0] is complex128, of which no inputs are made"]),
    "seed": (lambda: parity.probe_inputs((2, 2), seed=-1), ["seed must be a whole number, at least 0, got -1"]),
    "sets and arguments": (
        lambda: parity.compare(*block(), parity.InputSet("a", "", ()), normal(2, WIDTH)),
        ["give one input set, or one list of them, and no other arguments", "got 2 arguments, 1 of them"],
    ),
    "sets and kwargs": (
        lambda: parity.compare(*block(), parity.InputSet("a", "", ()), kwargs={"x": 1}),
        ["kwargs stand in the input sets"],
    ),
    "equal names": (
        lambda: parity.compare(*block(), [parity.InputSet("a", "", ())] * 2),
        ["input sets must have different names, got 'a' more than once"],
    ),
}


class Adding(nn.Module):
    def forward(self, x, ids):
        return x @ torch.ones(4, 2) + ids[:, None]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_is_refused(name):
    call, parts = REFUSED[name]
    with pytest.raises(parity.InputError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def test_a_row_of_one_place_is_never_hidden():
    assert not hidden_places((3, 1), "random", np.random.default_rng(0)).any()


def test_no_framework_is_loaded_to_make_inputs():
    code = """
import sys, numpy as np, parity
parity.probe_inputs(("n", "l", 4), parity.Ids(("n",), 5), parity.Mask(("l",), "added"), np.ones((2, 3), np.float32))
assert not {"torch", "jax", "flax"} & set(sys.modules)
import torch
parity.probe_inputs(torch.ones(2, 3), parity.Ids((2,)), model=type("M", (torch.nn.Module,), {
    "forward": lambda self, x, ids: torch.nn.functional.embedding(ids, x)})())
assert not {"jax", "flax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
