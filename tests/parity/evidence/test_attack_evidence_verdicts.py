"""Pairs that an attacker made up: what was wrong, silent or said too much, each planted again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from evidence_pairs import normal, transferred
from flax import nnx
from torch import nn

import parity
from parity.frameworks.torch.running import raises

FAST: dict[str, Any] = {"modes": ("compiled",), "diagnose": False}
X = normal(3, 4)


class TorchLine(nn.Module):
    """A layer, then a function of what it returns."""

    def __init__(self, function):
        super().__init__()
        self.line, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.line(x))


class FlaxLine(nnx.Module):
    def __init__(self, function):
        self.line, self.function = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), function

    def __call__(self, x):
        return self.function(self.line(x))


def pair(torch_function, flax_function=None):
    return transferred(TorchLine(torch_function), FlaxLine(flax_function or torch_function), "line")


class TorchPlain(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class FlaxPlain(nnx.Module):
    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


def first_cause(torch_function, flax_function, *args):
    found = parity.diagnose(TorchPlain(torch_function).eval(), FlaxPlain(flax_function), *args)
    return found.causes[0] if found.causes else None


# ------------------------------------------------------------------------------ outputs


def test_an_array_on_one_side_only_is_another_tree_and_no_level_invents_figures():
    report = parity.compare(*pair(lambda y: y, lambda y: None), X, **FAST)
    assert report.verdict == "outputs differ in structure"
    assert [report.level(name).summary for name in ("identical", "native")] == ["no output could be compared"] * 2
    assert parity.compare(*pair(lambda y: None, lambda y: y), X, **FAST).verdict == "outputs differ in structure"


def test_complex_numbers_on_flaxs_side_alone_are_no_agreement_of_their_real_parts():
    models = pair(lambda y: y, lambda y: jax.lax.complex(y, y))
    report = parity.compare(*models, X, levels=("structure", "wiring", "identical", "native"), **FAST)
    assert [level.status for level in report.levels] == ["failed"] * 4
    assert (
        parity.diagnose(*models, X).isolation.faults[0].differences[0].reason
        == "expected (torch) float64, actual (flax) complex128"
    )


def test_infinities_of_other_sign_are_told_without_a_warning():
    models = pair(lambda y: torch.where(y > 0, torch.inf, y), lambda y: jnp.where(y > 0, -jnp.inf, y))
    report = parity.compare(*models, X, levels=("structure", "identical", "native"), **FAST)
    assert report.level("identical").findings[0].what.endswith("expected (torch) inf, actual (flax) -inf")


def test_whole_numbers_are_counted_among_what_was_compared():
    report = parity.compare(*pair(lambda y: (y > 0, y.argmax(-1))), X, **FAST)
    assert "identical (15 values identical); wiring does not apply" in str(report).splitlines()[0]
    assert report.level("identical").summary == "15 whole numbers equal"
    wrong = parity.compare(*pair(lambda y: y > 0, lambda y: y > 0.1), normal(40, 4), **FAST)
    assert wrong.level("identical").summary == "160 whole numbers" and wrong.verdict == "differs"


def test_of_nothing_nothing_is_said_to_agree():
    report = parity.compare(*pair(lambda y: y), X[:0], **FAST)
    assert {name: report.level(name).status for name in ("identical", "native", "gradients")} == dict.fromkeys(
        ("identical", "native", "gradients"), "not applicable"
    )


# ------------------------------------------------------------------------------ buffers


class TorchAverage(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int32))

    def forward(self, x):
        y = self.line(x)
        self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.steps = self.steps + 1
        return y


class FlaxAverage(nnx.Module):
    def __init__(self, momentum=0.9, by=1):
        self.line, self.momentum, self.by = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), momentum, by
        self.average, self.steps = nnx.Variable(jnp.zeros(4)), nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        y = self.line(x)
        self.average.set_value(self.average[...] * self.momentum + y.mean(0) * (1 - self.momentum))
        self.steps.set_value(self.steps[...] + self.by)
        return y


@pytest.mark.parametrize(("options", "wrong"), [({}, []), ({"momentum": 0.1}, ["average"]), ({"by": 2}, ["steps"])])
def test_what_a_run_leaves_in_buffers_is_compared(options, wrong):
    models = transferred(TorchAverage(), FlaxAverage(**options), "average")
    report = parity.compare(*models, X, levels=("structure", "identical"), **FAST)
    assert [finding.where for finding in report.level("identical").findings] == wrong
    assert all(finding.what.endswith("after the run") for finding in report.level("identical").findings)
    assert int(models[0].steps) == int(models[1].steps[...]) == 0


def test_a_buffer_that_flax_has_not_is_said_not_to_be_compared():
    torch_model, flax_model = TorchAverage().eval(), FlaxLine(lambda y: y)
    ignored = ("average", "steps")
    parity.transfer(torch_model, flax_model, ignore=ignored)
    report = parity.compare(torch_model, flax_model, X, ignore=ignored, levels=("structure", "identical"), **FAST)
    assert report.passed
    assert "what they hold then was not compared: average, steps" in report.level("identical").notes[-1]


# ------------------------------------------------------------------------------ models that are refused


def test_a_model_whose_draws_seldom_matter_is_run_until_they_do():
    torch.manual_seed(0)
    draws = [float(torch.rand(())) for _ in range(8)]
    torch.manual_seed(0)
    level = sorted(draws)[0] * 1.0001
    assert draws.index(min(draws)) > 1, "the first two runs must agree"
    with pytest.raises(parity.InputError, match="the torch model returns different numbers") as caught:
        parity.compare(*pair(lambda y: torch.where(torch.rand(()) < level, y + 1, y), lambda y: y), X, **FAST)
    assert caught.value.code == "not repeatable"


def test_a_wrapped_model_is_refused_with_what_to_give_instead():
    torch_model, flax_model = pair(lambda y: y)
    with pytest.raises(
        parity.InputError, match=r"wrapped in torch.nn.DataParallel, which cannot run on copies; give its .module"
    ):
        parity.compare(nn.DataParallel(torch_model).eval(), flax_model, X)


def test_what_does_not_fit_is_not_compiled(monkeypatch):
    class OptimizedModule(TorchLine):
        pass

    asked: list[str] = []
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: asked.append(stance) or torch.no_grad())
    call = parity.evidence.calls.Call((normal(3, 5),), {}, frozenset({"args[0]"}))
    assert isinstance(raises(OptimizedModule(lambda y: y), call), str) and asked == ["force_eager"]
    assert isinstance(raises(TorchLine(lambda y: y), call), str) and asked == ["force_eager"]


# ------------------------------------------------------------------------------ causes


def test_whole_numbers_that_jax_wraps_by_itself_are_the_cause():
    class TorchHash(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, ids):
            return self.table((ids * 1_000_003 * 7919) % 10)

    class FlaxHash(nnx.Module):
        def __init__(self):
            self.table = nnx.Embed(10, 4, rngs=nnx.Rngs(0))

        def __call__(self, ids):
            return self.table((ids * 1_000_003 * 7919) % 10)

    report = parity.compare(*transferred(TorchHash(), FlaxHash(), "hash"), np.array([[0, 1, 9], [3, 4, 5]]), modes="compiled")
    assert report.level("identical").passed and report.verdict == "differs"
    assert [(cause.hypothesis, cause.path) for cause in report.diagnosis.causes] == [("whole numbers", "")]
    # In float64, where jax has 64 bits, the gradients agree: no factor is to be told.
    assert "times torch's everywhere" not in str(report)


def test_a_difference_of_the_size_of_rounding_is_not_called_rounding_where_nothing_is_rounded():
    # 0.4 % of the largest value; no operation of torch's alone explains it.
    cause = first_cause(torch.sin, lambda x: jnp.sin(x + 0.004 * jnp.cos(3 * x)), X)
    assert cause is None or cause.hypothesis != "size of rounding", cause


HALVES = normal(3, 5, 12)


@pytest.mark.parametrize(
    ("torch_function", "flax_function", "name", "says"),
    [
        (F.selu, jax.nn.elu, "activation", "elu where torch computes selu"),
        (lambda x: F.softplus(x, 2), jax.nn.softplus, "activation", "Flax's softplus has beta=1 where torch has 2"),
        (F.softsign, jnp.tanh, "activation", "tanh where torch computes softsign"),
        (torch.tanh, jax.nn.soft_sign, "activation", "softsign where torch computes tanh"),
        (F.logsigmoid, jax.nn.sigmoid, "activation", "sigmoid where torch computes log sigmoid"),
        (
            lambda x: F.silu(x[..., :6]) * x[..., 6:],
            lambda x: jax.nn.silu(x[..., 6:]) * x[..., :6],
            "order of pieces",
            "from 0 and from 6 on, are exchanged",
        ),
    ],
)
def test_functions_that_were_not_known(torch_function, flax_function, name, says):
    cause = first_cause(torch_function, flax_function, HALVES)
    assert cause is not None and cause.hypothesis == name and says in cause.what, cause


SCORES = normal(3, 2, 5, 5, name="scores")
KEYS = np.arange(5) < np.array([3, 4, 5]).reshape(3, 1, 1, 1)
CAUSAL = np.tril(np.ones((5, 5), bool))


@pytest.mark.parametrize(
    ("mask", "wrong", "says"),
    [
        (KEYS, lambda s, m: jnp.where(m, -1e9, s), "the mask is inverted"),
        (KEYS, lambda s, m: s, "the mask is not used"),
        (KEYS, lambda s, m: s + m, "the mask is added to the scores as numbers, 0 where torch hides"),
        (KEYS, lambda s, m: s * m, "hidden scores are 0 in Flax"),
        (KEYS, lambda s, m: jnp.where(m, s, s - 10), "-10 is added to hidden scores"),
        (KEYS, lambda s, m: jnp.where(m.swapaxes(-1, -2), s, -1e9), "the mask hides queries in place of keys"),
        (CAUSAL, lambda s, m: jnp.where(jnp.tril(jnp.ones((5, 5), bool), 1), s, -1e9), "the causal mask is moved by 1"),
    ],
)
def test_a_mask_that_torch_applies_by_where_is_known(mask, wrong, says):
    # Either way round.
    first = says == "the mask is inverted"
    cause = first_cause(
        lambda s, m: torch.softmax(torch.where(~m, torch.tensor(-1e9), s) if first else torch.where(m, s, -1e9), -1),
        lambda s, m: jax.nn.softmax(wrong(s, m), -1),
        SCORES,
        mask,
    )
    assert cause is not None and cause.hypothesis == "mask" and says in cause.what, cause


@pytest.mark.parametrize("side", ["Flax", "torch"])
def test_nan_on_one_side_is_a_cause_where_all_else_agrees(side):
    models = {
        "Flax": (lambda x: x * 2, lambda x: jnp.where(x > 0, x * 2, jnp.nan)),
        "torch": (lambda x: torch.sqrt(x) * 2, lambda x: jnp.sqrt(jnp.maximum(x, 0.01 * x * x)) * 2),
    }
    cause = first_cause(*models[side], X)
    assert cause is not None and cause.hypothesis == "NaN on one side" and cause.what.startswith(f"{side} has NaN")
    both = lambda x: x * 2.5, lambda x: jnp.where(x > 0, x * 2, jnp.nan)
    other = first_cause(*both, X)
    assert other is None or other.hypothesis != "NaN on one side"


def test_a_hypothesis_that_was_added_can_be_taken_back():
    parity.add_hypothesis("shifted by me", lambda suspect: ())
    with pytest.raises(parity.InputError, match=r"choose another name, or take it back by parity.remove_hypothesis"):
        parity.add_hypothesis("shifted by me", lambda suspect: ())
    parity.remove_hypothesis("shifted by me")
    for name in ("shifted by me", "epsilon", None):
        with pytest.raises(parity.InputError, match=r"no hypothesis .* was added; added are: none"):
            parity.remove_hypothesis(name)


def yields(*variants):
    return lambda suspect: iter(variants)


def raises_at_once(suspect):
    raise RuntimeError("at once")


@pytest.mark.parametrize(
    ("variants", "says"),
    [
        (raises_at_once, "RuntimeError: at once"),
        (lambda suspect: None, "TypeError: 'NoneType' object is not iterable"),
        (yields(3), "it yields 3, which is no parity.Variant with a function for its values"),
        (yields(parity.Variant("a", "b", 3)), "which is no parity.Variant with a function for its values"),  # type: ignore[arg-type]
        (yields(parity.Variant("a", "b", lambda: "c")), "the values of a variant are str, not a mapping"),  # type: ignore[arg-type, return-value]
    ],
)
def test_a_hypothesis_that_cannot_be_tried_is_told_in_the_report_and_stops_nothing(variants, says):
    parity.add_hypothesis("broken by me", variants)
    try:
        models = TorchPlain(lambda x: x * 2).eval(), FlaxPlain(lambda x: x * 2.5)
        report = parity.compare(*models, X, levels="identical", modes="compiled")
    finally:
        parity.remove_hypothesis("broken by me")
    assert report.diagnosis.causes[0].hypothesis == "factor"
    assert any(says in note and note.startswith("broken by me could not be tried") for note in report.diagnosis.notes)
    assert "note: broken by me could not be tried on the model" in str(report)


def test_a_hypothesis_that_takes_no_suspect_is_refused():
    with pytest.raises(parity.InputError, match=r"variants must take one argument, the suspect; it takes \(\)"):
        parity.add_hypothesis("of nothing", lambda: [])


def test_a_gradient_that_torch_stops_is_told_and_where_to_look():
    models = pair(lambda y: y.sin().detach() + 0 * y, lambda y: jnp.sin(y) + 0 * y)
    report = parity.compare(*models, X, levels=("identical", "gradients"), modes="compiled")
    assert "torch has a gradient of 0: something stops it, such as .detach()" in str(report)
    assert str(report).splitlines()[-1].startswith("  next: look in these modules for what stops or changes a gradient")


def test_ids_are_whole_numbers_and_one_problem_is_told_once():
    with pytest.raises(parity.InputError, match=r"args\[0\]: a vocabulary must have at least 2 ids, got 2.5$"):
        parity.probe_inputs(parity.Ids((3, 7), 2.5))  # type: ignore[arg-type]
    with pytest.raises(parity.InputError, match=r"cannot make inputs: args\[0\] is complex128, of which no inputs are made"):
        parity.probe_inputs(np.ones((2, 3), complex))


def test_a_weight_that_is_no_number_is_noted():
    torch_model, flax_model = pair(lambda y: y)
    with torch.no_grad():
        torch_model.line.weight[0, 0] = torch.nan
    parity.transfer(torch_model, flax_model)
    report = parity.compare(torch_model, flax_model, X, levels=("structure", "identical"), **FAST)
    assert report.passed
    assert "note: parameters hold NaN or infinity in places: what they reach shows no fault: line.weight" in str(report)


def test_another_rounding_of_ties_is_not_excused_by_what_shaking_does_to_ties():
    # torch rounds halves to the even number; shaken by half an ulp they go either way, a whole step apart.
    halves = np.round(normal(3, 8) * 4) / 4
    models = TorchPlain(lambda x: torch.round(x * 2)).eval(), FlaxPlain(lambda x: jnp.floor(x * 2 + 0.5))
    assert not parity.compare(*models, halves, levels="identical", **FAST).passed
    right = models[0], FlaxPlain(lambda x: jnp.round(x * 2))
    assert parity.compare(*right, halves, levels="identical", **FAST).passed


def test_a_dropout_with_a_key_of_its_own_is_the_cause():
    def dropped(x):
        return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), 2 * jnp.sin(x), 0)

    cause = first_cause(torch.sin, dropped, X)
    assert cause is not None and (cause.hypothesis, cause.change) == ("dropout left on", "draw nothing in eval mode")


def test_weights_that_are_all_left_out_are_not_said_to_be_none():
    report = parity.compare(*pair(lambda y: y), X, ignore="*", levels=("weights", "structure"), **FAST)
    assert report.level("weights").summary == "every array is left out, as asked"
