"""For every hypothesis a planted fault: the cause that is named first, and the module, exactly."""

import json
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from decoder_pair import FAULTS, decoder, sentences
from evidence_pairs import (
    FlaxCore,
    FlaxTwo,
    altered,
    attention,
    attention_inputs,
    block,
    draw,
    low_variance,
    normal,
    one_ulp,
    two,
)
from fault_pairs import (
    ONE_HIDDEN,
    PLANTED,
    SEQUENCES,
    SOME,
    FlaxPreNorm,
    TorchPreNorm,
    X,
    Y,
    attending,
    held,
    torch_attend,
)
from flax import nnx
from torch import nn

import parity
from parity.evidence.hypotheses.table import HYPOTHESES


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_the_planted_cause_is_named_first(planted):
    found = parity.diagnose(*planted.pair(), *planted.inputs, **dict(planted.options))
    assert [fault.path for fault in found.isolation.faults] == [planted.path], str(found)
    assert found.causes, str(found)
    first = found.causes[0]
    assert (first.hypothesis, first.path, first.complete) == (planted.cause, planted.path, True), str(found)
    assert planted.says in f"{first.what}; {first.change}", str(found)
    assert first.before > 1e3 and first.after <= 10
    assert not found.notes and not found.unexplained, str(found)


@pytest.mark.parametrize("fault", FAULTS)
def test_in_a_whole_decoder_the_module_is_named_exactly_and_the_cause_first(fault):
    path, cause, says = FAULTS[fault]
    found = parity.diagnose(*decoder(fault), *sentences())
    assert [one.path for one in found.isolation.faults] == [path], str(found)
    assert found.causes[0].hypothesis == cause, str(found)
    assert says in f"{found.causes[0].what}; {found.causes[0].change}", str(found)
    assert not found.notes and not found.unexplained and not found.isolation.unpaired, str(found)


def test_a_clean_decoder_has_no_cause():
    found = parity.diagnose(*decoder(), *sentences())
    assert found.passed and not found.causes and not found.isolation.unpaired, str(found)
    assert all(one.status == "agrees" for one in found.isolation.modules)


@pytest.mark.parametrize(
    ("leaf", "change", "says"),
    [
        (
            "layers.0.attn.out.kernel",
            lambda a: a.swapaxes(0, 1),
            "axes 0 and 1 of Flax's layers.0.attn.out.kernel",
        ),
        (
            "layers.0.attn.query.kernel",
            lambda a: a.reshape(16, 4, 4).swapaxes(1, 2),
            "in_proj_weight[q]: axes 1 and 2",
        ),
        ("layers.0.attn.value.bias", lambda a: a * 0, "in_proj_bias[v]: in Flax it is 0 everywhere"),
        ("layers.0.attn.value.kernel", one_ulp, "1 of 768 values of Flax's differ"),
    ],
    ids=["out", "query", "value bias", "one ulp"],
)
def test_weights_of_a_fused_attention_are_told_block_by_block(leaf, change, says):
    torch_model, flax_model = decoder()
    altered(flax_model, leaf, change)
    found = parity.diagnose(torch_model, flax_model, *sentences())
    assert [one.path for one in found.isolation.faults] == ["layers.0.attn"], str(found)
    assert found.causes[0].hypothesis == "weights" and says in found.causes[0].what, str(found)


# --------------------------------------------------------------- several faults


def causes(found: parity.Diagnosis) -> dict[str, list[str]]:
    """The names of the causes, the first of each that explains something new, by module."""
    told: dict[str, list[str]] = {}
    explained: dict[str, set[str]] = {}
    for cause in found.causes:
        if set(cause.explains) - explained.setdefault(cause.path, set()):
            told.setdefault(cause.path, []).append(cause.hypothesis)
            explained[cause.path] |= set(cause.explains)
    return told


def test_faults_in_several_modules_each_have_their_cause():
    torch_model, flax_model = attention("key and value swapped")
    flax_model.core = FlaxCore("scale")
    altered(flax_model, "q.kernel", np.transpose)
    altered(flax_model, "out.bias", lambda bias: bias * 0)
    found = parity.diagnose(torch_model, flax_model, *attention_inputs())
    assert causes(found) == {
        "q": ["weights"],
        "core": ["softmax scale"],
        "out": ["weights"],
        "": ["arguments exchanged"],
    }, str(found)


def test_a_wrong_weight_does_not_hide_a_wrong_epsilon_in_the_same_layer():
    torch_model, flax_model = block("epsilon")
    altered(flax_model, "norm.scale", lambda scale: scale.astype(np.float16).astype(np.float32))
    found = parity.diagnose(torch_model, flax_model, low_variance(3, 4, 8))
    assert found.causes[0].hypothesis == "epsilon"
    assert found.causes[0].complete, "with Flax's own scale in torch's layer the epsilon explains the rest"


def test_faults_at_two_places_of_one_module_are_both_told():
    class Twice(FlaxPreNorm):
        def __call__(self, x, memory):
            return 2 * x + self.up(x) + memory

    found = parity.diagnose(*held(TorchPreNorm(), Twice("", nnx.Rngs(0)), "pre"), X, Y)
    assert causes(found) == {"core": ["norm placement", "residual"]}, str(found)


def test_functions_of_a_sequential_are_told_apart():
    """In Flax they are no modules: each shows in what the model gives the module behind it."""
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)]
    flax_layers = [nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(3)]
    flax_model = nnx.Sequential(flax_layers[0], jax.nn.silu, flax_layers[1], jax.nn.gelu, flax_layers[2])
    torch_model = draw(nn.Sequential(*layers), "sequential")
    parity.transfer(torch_model, flax_model)
    found = parity.diagnose(torch_model, flax_model, X)
    told = {cause.explains: cause.what for cause in found.causes}
    assert told == {
        ("what it gives 2: args[0]",): "Flax computes silu where torch computes relu",
        ("what it gives 4: args[0]",): "Flax computes tanh gelu where torch computes gelu",
    }, str(found)


@pytest.mark.parametrize(
    ("wrong", "inputs", "names"),
    [
        (attending(lambda s: s * 2, lambda m: jnp.roll(m, 1, -1)), (*SEQUENCES, SOME), {"softmax scale", "mask"}),
        (attending(lambda s: s / 2, lambda m: m.swapaxes(-1, -2), -1e30), (*SEQUENCES, ONE_HIDDEN), None),
    ],
    ids=["scale and mask", "beyond two"],
)
def test_two_faults_at_one_place_are_told_together(wrong, inputs, names):
    found = parity.diagnose(*held(torch_attend, wrong, "two at one place"), *inputs)
    assert [fault.path for fault in found.isolation.faults] == ["core"]
    if names is None:
        assert not found.causes and found.unexplained
        return
    assert set(found.causes[0].hypothesis.split(" and ")) == names, str(found)
    assert found.causes[0].complete and found.causes[0].after <= 10
    assert "; and " in found.causes[0].what and "; and " in found.causes[0].change


def test_faults_that_cancel_each_have_their_cause():
    class Cancelling(FlaxTwo):
        def __call__(self, x):
            return self.a(self.act(self.b(self.b(x)))) * 0.5

    torch_model, flax_model = two(Cancelling)
    for leaf in ("a.kernel", "a.bias"):
        altered(flax_model, leaf, lambda array: 2 * array)
    report = parity.compare(torch_model, flax_model, normal(3, 4), levels=("weights", "identical"), modes="compiled")
    assert report.level("identical").passed, "what the models return is the same"
    assert causes(report.diagnosis) == {"a": ["weights"], "": ["factor"]}, str(report)
    assert "Flax's is 2 times torch's" in str(report) and "multiply by 2" in str(report)


# --------------------------------------------------------------- clean pairs, and what has no cause


@pytest.mark.parametrize("inputs", [(3, 4, 8), (8, 8, 8), (2, 1, 8)], ids=str)
def test_a_clean_pair_has_no_cause(inputs):
    found = parity.diagnose(*block(), normal(*inputs))
    assert found.passed and not found.causes and not found.unexplained
    assert str(found) == "0 wrong modules of 5 modules, each run alone on what torch's was given"


def test_a_module_that_no_hypothesis_explains_is_named_all_the_same():
    pair = held(torch.sin, lambda x: jnp.sin(x + 0.1 * x**2 * jnp.cos(x)), "odd")
    found = parity.diagnose(*pair, X)
    assert [fault.path for fault in found.isolation.faults] == ["core"]
    assert not found.causes and found.unexplained == ("core: output",)
    assert "no known cause: core: output" in str(found)


def test_causes_that_fit_equally_well_are_all_told():
    """Where every value is positive no one can tell relu from the identity."""
    pair = held(lambda x: torch.sigmoid(x.abs()), jax.nn.relu, "ambiguous")
    found = parity.diagnose(*pair, np.abs(X))
    (first, *others) = found.causes
    assert first.hypothesis == "activation" and others, str(found)
    assert "\n  or: " in str(found)


# --------------------------------------------------------------- precision


def fast_variance(x, epsilon=1e-5):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt((x * x).mean(-1, keepdims=True) - mean * mean + epsilon)


# By 100 the lost digits show in float64 too, on some processors.
SHIFTED = (X + 50).astype(np.float32)
LOSSES = {
    "setting": (
        lambda: held(nn.LayerNorm(8), nnx.LayerNorm(8, epsilon=1e-5, rngs=nnx.Rngs(0)), "fast"),
        (SHIFTED,),
        "fast variance",
    ),
    "by hand": (lambda: held(lambda x: F.layer_norm(x, (8,)), fast_variance, "fast"), (SHIFTED,), "fast variance"),
    "tf32": (lambda: attention("tf32"), attention_inputs(), "precision"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_precision_has_a_cause_although_float64_agrees(name):
    pair, inputs, cause = LOSSES[name]
    found = parity.diagnose(*pair(), *inputs)
    assert (found.isolation.dtype, [f.path for f in found.isolation.faults]) == ("float32", ["core"]), str(found)
    assert found.causes[0].hypothesis == cause
    assert found.causes[0].before > 4 and found.causes[0].after <= 1
    assert "the same in float64, not in float32" in str(found)


# --------------------------------------------------------------- hypotheses of the user's


def shifted_by_one(suspect: parity.Suspect) -> Iterator[parity.Variant]:
    yield parity.Variant(
        "Flax adds one to the input", "add nothing", lambda: suspect.again(args=(suspect.trial.torch.args[0] + 1,))
    )


@pytest.fixture
def own_hypothesis():
    yield parity.add_hypothesis("one more", shifted_by_one)
    HYPOTHESES.pop()


def test_users_add_hypotheses_of_their_own(own_hypothesis):
    found = parity.diagnose(*held(torch.sin, lambda x: jnp.sin(x + 1), "own"), X)
    assert (found.causes[0].hypothesis, found.causes[0].change) == ("one more", "add nothing")
    assert own_hypothesis.name == "one more"


def test_a_hypothesis_that_raises_is_told_and_stops_nothing():
    def broken(suspect):
        raise RuntimeError("half way")
        yield

    parity.add_hypothesis("broken", broken)
    try:
        found = parity.diagnose(*attention("scale"), *attention_inputs())
    finally:
        HYPOTHESES.pop()
    assert found.causes[0].hypothesis == "softmax scale"
    assert found.notes == ("broken could not be tried on core: RuntimeError: half way",)
    assert "note: broken could not be tried on core" in str(found)


@pytest.mark.parametrize(
    ("name", "variants", "says"),
    [
        ("", shifted_by_one, "name must be some words, got ''"),
        ("mask", shifted_by_one, "there is a hypothesis 'mask' already; choose another name"),
        ("new", 3, "variants must be a function of a suspect, got 3"),
    ],
)
def test_a_hypothesis_that_cannot_be_one_is_refused(name, variants, says):
    before = list(HYPOTHESES)
    with pytest.raises(parity.InputError, match=f"add_hypothesis: {re.escape(says)}"):
        parity.add_hypothesis(name, variants)
    assert before == HYPOTHESES


# --------------------------------------------------------------- reports


def test_a_diagnosis_is_plain_data_and_a_text():
    found = parity.diagnose(*block("epsilon"), low_variance(3, 4, 8))
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["causes"][0]["hypothesis"] == "epsilon" and data["passed"] is False
    assert data["isolation"]["modules"][0]["status"] == "differs"
    text = str(found)
    assert "norm   differs, alone" in text
    assert "cause: epsilon. Flax adds 1e-06 where torch adds 1e-05" in text
    assert re.search(
        r"if torch does the same, the difference falls from \S+e\+\d+ to 0\.\d+ times what rounding explains", text
    )
    assert "change: set epsilon=1e-05" in text


def test_a_setting_that_these_inputs_do_not_show_is_told():
    wrong = nnx.BatchNorm(8, epsilon=1e-5, momentum=0.1, use_fast_variance=False, rngs=nnx.Rngs(0))
    found = parity.diagnose(*held(nn.BatchNorm1d(8), wrong, "momentum"), normal(5, 8))
    assert found.passed
    assert "a setting differs: core: momentum=0.1 in torch, momentum=0.1 in Flax; set momentum=0.9" in str(found)


def test_a_failing_comparison_tells_where_how_much_why_and_what_next():
    report = parity.compare(*attention("scale"), *attention_inputs(), modes="compiled")
    parts = [
        "NOT the same function",
        "core   first divergence",
        "times what rounding explains",
        "identical  FAILED",
        "1 wrong module of 6 modules",
        "cause: softmax scale. Flax's scores are 1/sqrt(2) times torch's",
        "change: multiply the scores by sqrt(2)",
        "next: make the change, then compare again",
    ]
    places = [str(report).find(part) for part in parts]
    assert -1 not in places and places == sorted(places), str(report)
    assert len(str(report).splitlines()) <= 40
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["diagnosis"]["causes"][0]["hypothesis"] == "softmax scale"
    assert data["trace"]["steps"]


def test_a_comparison_diagnoses_only_failures_and_only_if_asked():
    assert parity.compare(*block(), normal(3, 4, 8), modes="compiled").diagnosis is None
    report = parity.compare(*block("epsilon"), low_variance(3, 4, 8), levels="identical", diagnose=False)
    assert report.diagnosis is None and "cause:" not in str(report)


def test_a_report_names_a_fault_without_a_known_cause():
    pair = held(torch.sin, lambda x: jnp.sin(x + 0.1 * x**2 * jnp.cos(x)), "odd")
    text = str(parity.compare(*pair, X, levels="identical"))
    assert "  core   " in text and "next: look at the code of these modules" in text
