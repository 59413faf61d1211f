import json
import sys

import jax
import numpy as np
import pytest

import parity
from parity import cli, suite
from parity.cases import FFN, PROGRAMS, Case, default_cases, full_cases

SMALL = next(program for program in PROGRAMS if program.module == FFN)


@pytest.fixture
def few(monkeypatch):
    """Two cases in place of the table, and none with trained weights."""
    monkeypatch.setattr(suite, "default_cases", lambda seed: [SMALL, Case(FFN, SMALL.sizes, SMALL.lengths, seed=seed + 1)])
    monkeypatch.setattr(suite, "trained_cases", lambda seed: [])


def run(monkeypatch, capsys, *argv):
    monkeypatch.setattr(sys, "argv", ["parity", *argv])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    captured = capsys.readouterr()
    return stopped.value.code, captured.out, captured.err


def test_agreement_exits_0_with_the_table_and_the_figures(few, monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "check")
    assert code == 0
    assert "FeedForwardNetwork" in out
    assert "2 of 2 cases agree" in out
    assert "0 unexplained" in out
    assert "torch " in out
    assert "jax " in out
    assert err == "comparing; most of a first run is compilation and takes about a minute\n"


def test_a_fault_exits_1_and_names_case_level_and_module(few, monkeypatch, capsys):
    monkeypatch.setattr("jax_impl.layers.ReLU.__call__", lambda self, input: jax.nn.gelu(input))
    # A program compiled for the clean module must not be found again, nor this one later.
    suite.load("nnx").cached_functional.cache_clear()
    try:
        code, out, _ = run(monkeypatch, capsys, "check")
    finally:
        suite.load("nnx").cached_functional.cache_clear()
    assert code == 1
    assert "0 of 2 cases agree" in out
    assert "NOT the same function" in out
    assert "model.1   first divergence   (last agreement: model.0)" in out


def test_json_is_one_document_with_every_case(few, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "check", "--json", "--seed", "5")
    data = json.loads(out)
    assert code == 0
    assert data["passed"] is True
    assert data["seed"] == 5
    assert len(data["cases"]) == 2
    assert {level["level"] for level in data["cases"][0]["report"]["levels"]} == set(parity.LEVELS)


def test_only_the_levels_asked_for_are_climbed(few, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "check", "--levels", "weights,identical")
    assert code == 0
    assert "identical" in out
    assert "wiring" not in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("check", "--device", "tpu"), "device must be cpu, gpu or all, got 'tpu'"),
        (("check", "--levels", "looks"), "no such level: 'looks'; the levels are weights"),
        (("check", "--levels", ","), "no such level: none given"),
        (("check", "--module", "Convolution"), "no module is called like 'Convolution'; there are"),
        (("check", "--seed", "-1"), "seed must be at least 0, got -1"),
        (("chek",), "No such command 'chek'"),
        (("check", "--seed", "x"), "as an integer"),
    ],
)
def test_misuse_exits_2_with_one_message(few, monkeypatch, capsys, argv, words):
    code, out, err = run(monkeypatch, capsys, *argv)
    assert code == 2
    assert words in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.skipif(not suite.no_gpu(suite.load("torch"), suite.load("nnx")), reason="here is a GPU")
@pytest.mark.parametrize(("device", "code"), [("gpu", 2), ("all", 0)])
def test_a_missing_device_is_a_visible_row_that_says_why(few, monkeypatch, capsys, device, code):
    found, out, _ = run(monkeypatch, capsys, "check", "--device", device)
    assert found == code
    assert "all modules on gpu" in out
    assert "skipped" in out
    assert "sees no CUDA device" in out


def test_missing_trained_weights_are_a_visible_row(few, monkeypatch, capsys):
    monkeypatch.setattr(suite, "why_missing", lambda: "not installed: pip install it")
    code, out, _ = run(monkeypatch, capsys, "check")
    assert code == 0
    assert "skipped: trained encoder: not installed: pip install it" in out


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_shows_every_module_and_figure(few, monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = run(monkeypatch, capsys, "check", "--levels", "weights")
    assert "2/2" in out
    assert "FeedForwardNetwork" in out.replace("\n", "")
    assert ("FeedForwardNetwork: weights 2/2" in out) == (width == 40)


def test_what_is_printed_into_a_pipe_has_no_control_codes(few, monkeypatch, capsys):
    _, out, err = run(monkeypatch, capsys, "check")
    assert "\x1b" not in out + err


@pytest.mark.parametrize("command", [("levels",), ("env",), ("env", "--json"), ("--help",)])
def test_the_other_commands_answer(monkeypatch, capsys, command):
    code, out, _ = run(monkeypatch, capsys, *command)
    assert code == 0
    assert out.strip()


def test_env_says_what_is_there():
    found = parity.environment()
    assert {"torch", "jax", "flax", "numpy", "python", "torch devices", "jax devices", "trained encoder"} <= set(found)


# --- the table of cases -------------------------------------------------------------------------


def test_the_default_table_has_at_least_200_cases_of_every_kind():
    cases = default_cases()
    assert len(cases) >= 200
    assert len({case.name for case in cases}) == len(cases)
    assert {case.dtype for case in cases} == {"float32", "float64", "bfloat16", "float16"}
    whole = {"EncoderLayer", "DecoderLayer", "Transformer"}
    assert {case.module for case in cases} == {program.module for program in PROGRAMS} | whole
    patterns = {"random", "causal", "padding", "hidden rows", "nothing hidden", "padding and causal"}
    assert {case.pattern for case in cases if case.mask} == patterns
    assert {len(case.mask) for case in cases} == {0, 1, 2, 3, 4}
    assert {case.mask_dtype for case in cases if case.mask} >= {"bool", "int64", "uint8", "float32", "denormal"}
    assert any(case.lengths[1] != case.lengths[2] for case in cases)
    assert any(case.lengths[0] == case.lengths[1] == case.lengths[2] > 1 for case in cases)
    assert any(case.lengths == (64, 10, 10) for case in cases)
    assert any(case.refused for case in cases)


def test_the_full_table_has_every_dtype_in_both_modes_for_every_module():
    cases = full_cases()
    wanted = {(p.module, d) for p in PROGRAMS for d in ("float32", "float64", "bfloat16", "float16")}
    assert {(case.module, case.dtype) for case in cases if set(case.modes) == {"compiled", "eager"}} >= wanted


def test_another_seed_means_other_numbers():
    first, second = (suite.prepared(Case(FFN, SMALL.sizes, SMALL.lengths, seed=seed)) for seed in (1, 2))
    assert not np.array_equal(first[2][0], second[2][0])


def test_a_case_that_should_be_refused_fails_if_it_is_not():
    result = suite.run_case(Case(FFN, SMALL.sizes, SMALL.lengths, refused=True), ("weights",))
    assert not result.passed
    assert "neither did" in result.error
