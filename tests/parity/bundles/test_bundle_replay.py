"""A recorded model of one framework against a live one of the other: every level, the trace, and each planted fault."""

import json

import bundle_pairs as pairs
import ml_dtypes
import numpy as np
import pytest
import torch
from evidence_pairs import altered, attention, attention_inputs, one_ulp
from flax import nnx

import parity

SIDES = ("torch", "flax")


def live(side, torch_model, flax_model):
    """The model of the side that was not recorded."""
    return flax_model if side == "torch" else torch_model


@pytest.mark.parametrize("side", SIDES)
def test_a_clean_pair_passes_every_level_that_the_file_allows(side, models, recorded):
    report = parity.replay(recorded[side], live(side, *models))
    assert report.passed, str(report)
    assert pairs.statuses(report) == {
        **dict.fromkeys(("weights", "structure", "identical", "native", "gradients"), "passed"),
        "wiring": "not applicable",
    }
    whose = {"torch": "expected (torch)", "flax": "actual (flax)"}[side]
    assert f"{whose} is read from {side}.safetensors, recorded 20" in str(report)
    assert report.transfer is not None and report.environment["torch"] and report.environment["jax"]
    assert report.environment[f"{side} recorded with numpy"] == np.__version__
    json.dumps(report.to_dict())


@pytest.mark.parametrize("side", SIDES)
def test_the_figures_are_those_of_a_comparison(side, models, recorded):
    given = pairs.ids(), pairs.scale()
    there = parity.compare(*models, *given)
    here = parity.replay(recorded[side], live(side, *models))
    for one, other in zip(there.levels, here.levels, strict=True):
        assert (one.level, one.status, one.figures) == (other.level, other.status, other.figures)
        assert one.notes == other.notes


@pytest.mark.parametrize("side", SIDES)
def test_a_wrong_epsilon_is_named_with_its_module_and_cause(side, models, tmp_path, recorded):
    wrong = pairs.flax_model(models[0], epsilon=1e-6)
    path = recorded["torch"]
    if side == "flax":
        path = parity.record(wrong, pairs.ids(), pairs.scale(), path=tmp_path / "f.safetensors")
    report = parity.replay(path, live(side, models[0], wrong))
    assert not report.passed and report.trace.first_divergence().path == "norm"
    assert [fault.path for fault in report.diagnosis.isolation.faults] == ["norm"]
    [cause] = report.diagnosis.causes
    assert (cause.hypothesis, cause.path, cause.complete) == ("epsilon", "norm", True)
    assert "set epsilon=1e-05" in cause.change
    whole = str(report)
    assert "norm   first divergence   (last agreement: embed)" in whole
    assert "expected (torch)" in whole and "actual (flax)" in whole


@pytest.mark.parametrize("side", SIDES)
def test_a_weight_that_is_off_by_one_ulp_is_found_in_its_module(side, models, tmp_path, recorded):
    wrong = pairs.flax_model(models[0])
    altered(wrong, "out.kernel", one_ulp)
    path = recorded["torch"]
    if side == "flax":
        path = parity.record(wrong, pairs.ids(), pairs.scale(), path=tmp_path / "f.safetensors")
    report = parity.replay(path, live(side, models[0], wrong), levels=["weights", "identical"])
    assert set(pairs.statuses(report).values()) == {"failed"}
    assert [(cause.hypothesis, cause.path) for cause in report.diagnosis.causes] == [("weights", "out")]


@pytest.mark.parametrize(
    ("side", "fault", "path", "cause"),
    [
        ("torch", "mask off by one", "core", ""),
        ("flax", "mask off by one", "core", "mask"),
        ("flax", "key and value swapped", "", "arguments exchanged"),
    ],
)
def test_a_fault_in_a_modules_code_is_found_in_its_module(side, fault, path, cause, tmp_path):
    torch_model, flax_model = attention(fault)
    model = torch_model if side == "torch" else flax_model
    bundle = parity.record(model, *attention_inputs(), path=tmp_path / "b.safetensors", gradients=False)
    report = parity.replay(bundle, live(side, torch_model, flax_model), levels=["structure", "identical"])
    assert [one.path for one in report.diagnosis.isolation.faults] == [path]
    # Where torch's code cannot be run, no cause inside it is tried, and the report says so.
    assert [one.hypothesis for one in report.diagnosis.causes][:1] == ([cause] if cause else [])
    assert ("causes inside torch's code were not tried" in str(report)) is (side == "torch")


@pytest.mark.parametrize(
    ("faults", "wrong", "cause"),
    [({}, [], []), ({"epsilon": 1e-3}, ["norm"], ["epsilon"]), ({"shift": 1}, [""], ["mask that is passed on"])],
)
def test_torchs_modules_are_run_on_what_flaxs_took_in_other_words(faults, wrong, cause, tmp_path):
    torch_model, flax_model = pairs.picture_pair(**faults)
    path = parity.record(flax_model, *pairs.picture(), path=tmp_path / "b.safetensors", gradients=False)
    report = parity.replay(path, torch_model, levels=["structure", "identical"])
    assert report.passed is not bool(faults)
    if faults:
        assert [one.path for one in report.diagnosis.isolation.faults] == wrong
        assert [one.hypothesis for one in report.diagnosis.causes] == cause


def test_linen_is_recorded_and_replayed(models, recorded, tmp_path):
    right, wrong = pairs.linen_model(models[0]), pairs.linen_model(models[0], epsilon=1e-6)
    levels = ["weights", "structure", "identical"]
    assert parity.replay(recorded["torch"], right, levels=levels).passed
    report = parity.replay(recorded["torch"], wrong, levels=levels)
    assert [(cause.hypothesis, cause.path) for cause in report.diagnosis.causes] == [("epsilon", "norm")]
    given = pairs.ids(), pairs.scale()
    path = parity.record(right, *given, path=tmp_path / "l.safetensors", gradients=False)
    report = parity.replay(path, models[0], levels=levels)
    assert report.passed, str(report)


@pytest.mark.parametrize("side", SIDES)
def test_half_precision_and_several_input_sets(side, tmp_path):
    torch_model = pairs.torch_model(torch.bfloat16)
    flax_model = pairs.flax_model(torch_model, dtype=ml_dtypes.bfloat16)
    given = pairs.scale().astype(ml_dtypes.bfloat16)
    sets = [
        parity.InputSet("plain", "values", (pairs.ids(), given)),
        parity.InputSet("other", "ids", (pairs.ids()[::-1], given)),
    ]
    model = torch_model if side == "torch" else flax_model
    path = parity.record(model, sets, path=tmp_path / "half.safetensors", gradients=False)
    report = parity.replay(path, live(side, torch_model, flax_model), levels=["weights", "structure", "identical"])
    assert report.passed, str(report)
    assert [one.name for one in report.sets] == ["plain", "other"]


@pytest.mark.parametrize("side", SIDES)
def test_a_mask_and_nan_in_outputs(side, models, tmp_path):
    given = pairs.ids(), pairs.scale(), pairs.mask()
    model = models[0] if side == "torch" else models[1]
    path = parity.record(model, *given, path=tmp_path / "m.safetensors", gradients=False)
    padded = parity.record(model, *given, path=tmp_path / "p.safetensors", gradients=False, padding_mask=pairs.mask())
    other = live(side, *models)
    report = parity.replay(padded, other, levels=["structure", "identical"])
    assert report.passed and "padding-mask" in [note.code for note in report.notes]
    report = parity.replay(path, other, levels=["structure", "identical"])
    assert report.passed, str(report)
    assert report.level("identical").figures["elements"] == 30 + 48


# ------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize("side", SIDES)
def test_summaries_still_trace_and_say_what_they_lack(side, models, recorded, tmp_path):
    assert parity.replay(recorded[f"{side} summaries"], live(side, *models), levels=["weights", "identical"]).passed
    wrong = pairs.flax_model(models[0], epsilon=1e-6)
    path = recorded["torch summaries"]
    if side == "flax":
        given = pairs.ids(), pairs.scale()
        options = {"keep": "summaries", "gradients": False}
        path = parity.record(wrong, *given, path=tmp_path / "f.safetensors", **options)
    report = parity.replay(path, live(side, models[0], wrong), levels=["identical", "gradients"])
    assert report.trace.first_divergence().path == "norm" and report.diagnosis is None
    assert report.level("gradients").status == "not run" and "without gradients" in report.level("gradients").summary
    assert "parity.compare tells which modules are wrong, and why, where both frameworks are installed" in str(report)


@pytest.mark.parametrize("side", SIDES)
def test_digests_judge_weights_and_outputs_alone(side, models, recorded):
    levels = ["weights", "structure", "identical", "native"]
    assert parity.replay(recorded[f"{side} digests"], live(side, *models), levels=levels).passed
    wrong = pairs.flax_model(models[0])
    altered(wrong, "out.kernel", one_ulp)
    if side == "torch":
        report = parity.replay(recorded["torch digests"], wrong, levels=["weights", "identical"])
        assert set(pairs.statuses(report).values()) == {"failed"} and report.trace is None
        assert "differs from out.kernel in some bits" in str(report)


def test_each_size_is_smaller_than_the_one_before(recorded):
    for side in SIDES:
        sizes = [recorded[name].stat().st_size for name in (side, f"{side} summaries", f"{side} digests")]
        assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3


# ------------------------------------------------------------------------------ what is refused


def test_a_model_of_the_recorded_framework_is_refused(models, recorded):
    with pytest.raises(parity.InputError, match=r"was recorded from a torch.nn.Module; replay it against a flax.nnx.Module"):
        parity.replay(recorded["torch"], models[0])
    with pytest.raises(parity.InputError, match=r"was recorded from a flax.nnx.Module or a parity.Linen; replay it against"):
        parity.replay(recorded["flax"], 3)


def test_all_that_is_wrong_with_a_call_of_record_is_told(tmp_path):
    with pytest.raises(parity.InputError, match=r"cannot record: 4 problems") as caught:
        parity.record(3, path=tmp_path / "b.pt", keep="most", seed=-1)
    for words in ("seed must be", "name it b.safetensors", "model must be a torch.nn.Module", "keep must be 'all'"):
        assert words in str(caught.value)


@pytest.mark.parametrize("side", SIDES)
def test_a_model_in_train_mode_is_refused(side, tmp_path):
    from flax import nnx

    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5))
    if side == "flax":
        model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    with pytest.raises(parity.InputError, match=r"is in train mode.*call .eval\(\) on it first$"):
        parity.record(model, np.ones((2, 3), np.float32), path=tmp_path / "b.safetensors")
    assert not list(tmp_path.iterdir())


def test_what_the_recorded_model_raised_is_told_as_it_was(models, tmp_path):
    class Refusing(torch.nn.Module):
        def forward(self, x):
            raise KeyError("no such thing")

    with pytest.raises(parity.InputError, match="the model raises KeyError: 'no such thing'") as caught:
        parity.record(Refusing().eval(), np.ones((2, 3), np.float32), path=tmp_path / "b.safetensors")
    # The model's own error, with the way to it.
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_replay_can_be_made_of_some_levels_and_without_a_diagnosis(models, recorded):
    wrong = pairs.flax_model(models[0], epsilon=1e-6)
    report = parity.replay(recorded["torch"], wrong, levels=["weights", "gradients"], diagnose=False)
    assert [level.level for level in report.levels] == ["weights", "gradients"] and report.diagnosis is None
    assert set(pairs.statuses(report).values()) == {"failed"}
    settings = parity.replay(recorded["torch"], wrong, levels=["weights"], ignore=["norm.eps"])
    assert settings.passed and settings.level("weights").figures["bytes"] == 4 * (56 + 16 + 45)


def test_bad_inputs_are_compared_as_they_were_recorded(models, recorded):
    report = parity.replay(recorded["torch"], models[1], levels=["structure"], strict=True)
    assert "one wider than it should be" not in str(report)
    assert any("float16" in finding.what for finding in report.level("structure").findings)


@pytest.mark.parametrize("side", SIDES)
def test_the_recorded_parameters_can_be_transferred(side, models, recorded):
    target = pairs.FlaxSmall() if side == "torch" else pairs.TorchSmall().eval()
    found = parity.transfer(recorded[side], target)
    assert f"{side}.safetensors is a bundle: its model's parameters are taken" in found.notes
    assert parity.replay(recorded[side], found.value, levels=["weights"]).passed
    with pytest.raises(parity.InputError, match="holds digests of parameters"):
        parity.transfer(recorded[f"{side} digests"], target)


def test_a_proof_that_the_recorded_flax_model_cannot_run_is_left_out_and_told(tmp_path):
    ours, theirs = torch.nn.Linear(6, 5).eval(), nnx.Linear(6, 5, rngs=nnx.Rngs(0))
    parity.transfer(ours, theirs)
    x = np.random.default_rng(0).standard_normal((3, 4, 6), dtype=np.float32)
    path = parity.record(theirs, x, path=tmp_path / "linear.safetensors")
    report = parity.replay(path, ours)
    assert report.passed and report.verdict == "same"
    assert "wiring" not in pairs.statuses(report)
    assert "wiring is left out: the recorded Flax model would have to run on the numbers of torch's proof" in str(report)
    asked = parity.replay(path, ours, levels=["wiring", "identical"])
    assert not asked.passed and asked.level("wiring").status == "not run"
