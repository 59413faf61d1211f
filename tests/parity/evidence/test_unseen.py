"""What is noise, convention or padding, and no fault; and what outputs cannot show at all."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from evidence_pairs import FlaxTwo, normal, transferred, two
from flax import nnx
from torch import nn

import parity
from parity.evidence.result import LEVELS
from parity.frameworks import load

X = normal(3, 5, 4)
PADDED = np.arange(5) >= np.array([[5], [3], [2]])
FAST: dict[str, Any] = {"modes": ("compiled",)}


def notes(report: parity.Report, code: str) -> list[str]:
    return [str(note) for note in report.notes if note.code == code]


class TorchThen(nn.Module):
    """A layer, then a function of its result and of the other arguments."""

    def __init__(self, function):
        super().__init__()
        self.line, self.function = nn.Linear(4, 4), function

    def forward(self, x, *args):
        return self.function(self.line(x), *args)


class FlaxThen(nnx.Module):
    def __init__(self, function):
        self.line, self.function = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), function

    def __call__(self, x, *args):
        return self.function(self.line(x), *args)


def pair(torch_function, flax_function):
    return transferred(TorchThen(torch_function), FlaxThen(flax_function), "then")


# ------------------------------------------------------------------------------ padding


def padded(fault: str = ""):
    """Torch leaves padding as it is, Flax fills it; the second output is a mean that padding does not reach."""

    def flax_function(y, mask):
        filled = jnp.where(mask[..., None], jnp.nan if fault == "nan" else 7.0, y * (1.001 if fault == "scale" else 1))
        return filled, jnp.where(mask[..., None], 0, y).sum(1)

    return pair(lambda y, mask: (y, y.masked_fill(mask[..., None], 0).sum(1)), flax_function)


@pytest.mark.parametrize(("fault", "of"), [("", np.asarray), ("nan", torch.from_numpy), ("nan", jnp.asarray)])
def test_outputs_are_compared_outside_a_padding_mask_and_said_so(fault, of):
    without = parity.compare(*padded(fault), X, PADDED, levels=("structure", "identical"), diagnose=False)
    assert without.level("structure" if fault else "identical").status == "failed"
    levels = LEVELS[1:] if of is np.asarray else ("structure", "identical")
    report = parity.compare(*padded(fault), X, PADDED, padding_mask=of(PADDED), levels=levels, **FAST)
    assert report.passed, str(report)
    # What is no padding, and three rows of sums.
    left = 4 * int((~PADDED).sum())
    assert report.level("identical").figures["elements"] == left + 12
    [said] = notes(report, "padding-mask")
    hidden = 60 - left
    assert said == f"compared outside the padding mask, which leaves out {hidden} of 60 values of [0]; compared whole: [1]"
    [inside] = notes(report, "padding-differs")
    assert inside.startswith(f"output [0] differs at {hidden} of {hidden} values inside the padding mask")
    assert ("NaN or infinity on one side only" in inside) == bool(fault) and inside.endswith("not counted")
    assert said in str(report) and inside in str(report)
    assert {note["code"] for note in report.to_dict()["notes"]} >= {"padding-mask", "padding-differs"}


def test_a_fault_outside_of_padding_is_found_and_diagnosed():
    report = parity.compare(*padded("scale"), X, PADDED, padding_mask=PADDED, levels=("identical", "gradients"))
    assert report.level("identical").status == "failed"
    finding = report.level("identical").findings[0]
    assert finding.where == "output [0]" and finding.figures["differing"] <= 4 * int((~PADDED).sum())
    worst = report.trace.first_divergence().worst
    assert not PADDED[worst[0], worst[1]]
    assert [cause.hypothesis for cause in report.diagnosis.causes], str(report)


def test_padding_that_does_not_differ_is_told_of_without_a_difference():
    report = parity.compare(*two(), X, padding_mask=PADDED, levels="identical")
    assert report.passed and not notes(report, "padding-differs") and len(notes(report, "padding-mask")) == 1


def test_each_output_may_have_a_padding_mask_of_its_own():
    def flax_function(y):
        last = jnp.where(PADDED.T[..., None], 0, y.swapaxes(0, 1))
        return {"a": y.at[1].set(0), "b": last}

    models = pair(lambda y: {"a": y, "b": y.swapaxes(0, 1)}, flax_function)
    # One of the first output's axes has a 1: the whole second entry is padding.
    given = {"['b']": PADDED.T, "['a']": np.array([[False], [True], [False]])}
    report = parity.compare(*models, X, padding_mask=given, levels="identical")
    assert report.passed, str(report)
    assert notes(report, "padding-mask") == [
        "compared outside the padding mask, which leaves out 20 of 60 values of ['a'], 20 of 60 values of ['b']"
    ]
    assert not parity.compare(*models, X, padding_mask={"['b']": PADDED.T}, levels="identical", diagnose=False).passed


BAD_MASKS = {
    "no bool": (PADDED.astype(np.float32), ["padding_mask must be bool, True where a place is padding, got float32"]),
    "all": (PADDED | True, ["padding_mask of shape (3, 5) hides everything"]),
    "shape": (PADDED.T, ["padding_mask of shape (5, 3) fits no output", "the output (3, 5, 4)"]),
    "empty": ({}, ["padding_mask is an empty mapping"]),
    "name": ({"x": PADDED}, ["padding_mask['x'] of shape (3, 5) fits no output of that name"]),
    "several": (
        {"": PADDED | True, "x": PADDED * 1},
        ["2 problems", "padding_mask[''] of shape", "padding_mask['x'] must be bool"],
    ),
}


@pytest.mark.parametrize("name", BAD_MASKS)
def test_a_padding_mask_that_fits_nothing_is_refused(name):
    mask, parts = BAD_MASKS[name]
    with pytest.raises(parity.InputError) as caught:
        parity.compare(*two(), X, padding_mask=mask, levels="structure")
    for part in parts:
        assert part in str(caught.value)


# ------------------------------------------------------------------------------ parameters that outputs cannot see


class TorchUnseen(nn.Module):
    """`dead` feeds only what is multiplied by zero, `key` only what softmax takes away, `off` a unit that is off."""

    def __init__(self):
        super().__init__()
        self.line, self.dead, self.off = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.key = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        y = torch.softmax(self.line(x) + self.key, -1)
        return y + 0 * self.dead(x) + torch.relu(self.off(x) - 100)


class FlaxUnseen(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.line, self.dead, self.off = (nnx.Linear(4, 4, rngs=rngs) for _ in range(3))
        self.key = nnx.Param(jnp.zeros(1))

    def __call__(self, x):
        y = jax.nn.softmax(self.line(x) + self.key[...], -1)
        return y + 0 * self.dead(x) + jax.nn.relu(self.off(x) - 100)


def test_parameters_on_which_no_output_depends_are_told_apart_from_zero_gradients():
    report = parity.compare(*transferred(TorchUnseen(), FlaxUnseen(), "unseen"), X, levels=("identical", "gradients"))
    assert report.passed, str(report)
    [unseen] = [note for note in report.notes if note.code == "unseen-parameters"]
    assert set(unseen.figures["paths"]) == {"key", "dead.weight", "dead.bias"}
    assert str(unseen).startswith("the outputs do not depend on: ") and "only the level weights compares them" in str(unseen)
    [still] = [note for note in report.notes if note.code == "zero-gradients"]
    assert set(still.figures["paths"]) == {"off.weight", "off.bias"}


def test_a_model_whose_parameters_all_count_is_told_nothing():
    assert parity.compare(*two(), X, levels=("identical", "gradients")).notes == ()


# ------------------------------------------------------------------------------ ties and kinks


def test_whole_numbers_that_hang_on_a_tie_are_no_difference_and_others_are():
    def last(z):
        return 3 - z[..., ::-1].argmax(-1)

    def compared(flax_function, z):
        models = pair(lambda _, z: z.argmax(-1), lambda _, z: flax_function(z))
        return parity.compare(*models, X, z, levels=("identical", "native"), **FAST)

    z = normal(3, 5, 4, name="z")
    z[..., 3] = z[..., 0]
    # Torch chooses one of the two, whichever it is.
    reports = [compared(own, z) for own in (lambda z: z.argmax(-1), last)]
    assert all(report.passed for report in reports), str(reports)
    [told] = {note for report in reports for note in report.level("identical").notes}
    assert "whole numbers hang on a tie, and agree where there is none" in told
    wrong = parity.compare(*pair(lambda y: y.argmax(-1), lambda y: y.argmin(-1)), X, levels=("identical", "native"), **FAST)
    assert wrong.level("identical").findings[0].what == "15 of 15 whole numbers differ"
    assert wrong.level("native").status == "failed"


def test_gradients_that_differ_at_ties_alone_are_compared_off_them():
    x = X.copy()
    x[..., 1] = x[..., 0]

    def compared(torch_function, flax_function):
        models = transferred(TorchPick(torch_function), FlaxPick(flax_function), "pick")
        return parity.compare(*models, x, levels=("identical", "gradients"), diagnose=False).level("gradients")

    level = compared(lambda y: y.max(-1).values, lambda y: y.max(-1))
    assert level.passed and "tie for a maximum, where frameworks choose other gradients" in level.notes[0]
    assert "compared on inputs moved off them, gradients of input args[0] agree" in level.notes[0]
    # Torch's own gradient jumps at a tie, but that excuses no fault.
    level = compared(lambda y: y.max(-1).values, lambda y: y.max(-1) + 0.01 * (y - jax.lax.stop_gradient(y)).sum(-1))
    assert level.status == "failed"


def test_a_gradient_that_differs_on_kinks_alone_is_a_difference_and_named_so():
    x = X.copy()
    x[0] = 0
    models = transferred(TorchPick(torch.relu), FlaxPick(lambda y: jnp.maximum(y, 0)), "pick")
    level = parity.compare(*models, x, levels="gradients", diagnose=False).level("gradients")
    assert level.status == "failed"
    assert level.findings[0].what.endswith("20 values lie exactly on a kink, and on inputs moved off them it agrees")


class TorchPick(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(4)), function

    def forward(self, x):
        return self.function(x * self.scale.mean())


class FlaxPick(nnx.Module):
    def __init__(self, function):
        self.scale, self.function = nnx.Param(jnp.ones(4)), function

    def __call__(self, x):
        return self.function(x * self.scale[...].mean())


def test_near_ties_of_choices_are_counted_and_far_ones_are_not():
    kinks = load("torch").Kinks
    near = torch.tensor([[1.0, 1.0 + 1e-7, 0.0], [3.0, 2.0, 1.0]])
    for call, counted in (
        (lambda x: x.max(-1), (1, 0)),
        (lambda x: x.amax(-1), (1, 0)),
        (lambda x: x.min(-1), (0, 0)),
        (lambda x: x.topk(2, -1), (1, 0)),
        (lambda x: torch.sort(x, dim=0, stable=True), (0, 0)),
        (lambda x: x.argmax(), (0, 0)),
        (lambda x: x.kthvalue(2, -1), (1, 0)),
        (lambda x: torch.maximum(x, x.clone()), (0, 6)),
        (lambda x: torch.where(x > 2.5, -1e20, x).max(-1), (1, 0)),
        (lambda x: nn.functional.max_pool2d(x[None, :, :2], 1, 1), (0, 0)),
        (lambda x: nn.functional.max_pool2d(x[None], (1, 3)), (1, 0)),
    ):
        with kinks(2.0**-24) as watch:
            call(near)
        assert (watch.near, watch.ties) == counted


# ------------------------------------------------------------------------------ noise


def test_a_lost_digit_is_told_with_its_size_and_the_tolerance_that_would_pass():
    models = two(type("FlaxHalf", (FlaxTwo,), {"__call__": lambda self, x: FlaxTwo.__call__(self, round_off(x))}))
    report = parity.compare(*models, X, levels="native", diagnose=False, **FAST)
    finding = report.level("native").findings[0]
    assert f"would pass at atol={finding.figures['atol']:.3g}" in finding.what and "times the allowed" in finding.what
    with load("torch").pinned():
        expected = models[0](torch.from_numpy(X)).detach().numpy()
    gap = np.abs(np.asarray(models[1](jnp.asarray(X))) - expected).max()
    assert np.isclose(finding.figures["atol"], gap, rtol=0.1)


def round_off(x):
    return x.astype(jnp.bfloat16).astype(x.dtype) if x.dtype == jnp.float32 else x


def test_denormal_outputs_that_flax_flushes_are_told():
    def tiny(y):
        return y * 1e-20 * 1e-20

    report = parity.compare(*pair(tiny, tiny), X, levels=("structure", "native"), **FAST)
    assert report.passed, str(report)
    [said] = notes(report, "flushed")
    assert "denormal numbers in torch that are zero in Flax: XLA flushes them on the CPU" in said
    assert parity.compare(*two(), X, levels=("structure", "native"), **FAST).notes == ()


def test_a_difference_that_denormal_numbers_make_is_named_so():
    def through(y):
        return (y * 1e-38 * 0.01) * 1e38

    # Compiled, XLA would join the factors.
    report = parity.compare(*pair(through, through), X, levels=("native",), modes="eager", diagnose=False)
    finding = report.level("native").findings[0]
    assert "denormal numbers explain it: torch keeps them, XLA on the CPU turns them to zero" in finding.what
    assert float(torch.tensor(1e-40) * torch.tensor(1.0)) > 0
