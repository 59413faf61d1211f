"""Pairs that a user declares: found by the command line and by pytest alike, and what goes wrong in their files."""

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import parity
from parity import declared
from parity.cli import app

HEAD = """
import numpy as np, parity, torch
from flax import nnx

class Port(nnx.Module):
    def __init__(self, n, rngs, scale=1.0):
        self.a, self.scale = nnx.Linear(4, n, rngs=rngs), scale

    def __call__(self, x):
        return self.a(x) * self.scale

class Ours(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a = torch.nn.Linear(4, n)

    def forward(self, x):
        return self.a(x)

def made(n, scale=1.0, **options):
    x = np.random.default_rng(n).standard_normal((3, 4)).astype(np.float32)
    torch.manual_seed(n)
    return parity.Pair(Ours(n).eval(), Port(n, nnx.Rngs(0), scale), x, **options)
"""
GOOD = """
@parity.pair(each={"small": {"n": 6}, "large": {"n": 9}})
def layer(n):
    return made(n, levels=["weights", "identical"])
"""
WRONG = """
@parity.pair
def wrong():
    return made(5, scale=1.001, levels=["identical"], diagnose=False)
"""
RAISES = """
@parity.pair
def raises():
    return made(1 / 0)
"""
NO_PAIR = """
@parity.pair
def none():
    return 3
"""
ARGS = (
    () if any(e.name == "parity" for e in importlib.metadata.entry_points(group="pytest11")) else ("-p", "parity.pytest_plugin")
)


def file_of(folder: Path, *parts: str, name: str = "cases.py") -> Path:
    path = folder / name
    path.write_text(HEAD + "".join(parts), encoding="utf-8")
    return path


def cli(*args: object):
    return CliRunner().invoke(app, [str(arg) for arg in args])


# ----------------------------------------------------------------------------- the command line


def test_the_command_line_runs_every_pair_of_a_file(tmp_path):
    done = cli("check", file_of(tmp_path, GOOD, WRONG, RAISES, NO_PAIR), "--json")
    assert done.exit_code == 1
    cases = {case["name"]: case for case in json.loads(done.stdout)["cases"]}
    assert {name: case["passed"] for name, case in cases.items()} == {
        **{"layer[small]": True, "layer[large]": True},
        **{"wrong": False, "raises": False, "none": False},
    }
    assert (
        cases["raises"]["error"]
        == f"the function raises ZeroDivisionError: division by zero ({tmp_path / 'cases.py'}:{line(tmp_path, '1 / 0')})"
    )
    assert cases["none"]["error"] == "the function must return a parity.Pair, got int"
    levels = [level["level"] for level in cases["wrong"]["report"]["levels"]]
    assert levels == ["identical"]


def line(folder: Path, text: str) -> int:
    return next(i for i, found in enumerate((folder / "cases.py").read_text().splitlines(), 1) if text in found)


def test_a_table_of_own_pairs_names_their_file_and_counts_what_could_not_be_compared(tmp_path):
    path = file_of(tmp_path, GOOD, RAISES)
    done = cli("check", path, "--levels", "identical")
    assert done.exit_code == 1
    assert str(path) in done.output.replace("\n", "") and "2 of 3 cases agree" in done.output
    rows = {row.split()[0]: row.split()[1:] for row in done.output.splitlines() if row.startswith(("layer ", "raises "))}
    assert rows == {"layer": ["2/2"], "raises": ["0/1"]}


def test_one_pair_is_compared_by_its_name(tmp_path):
    path = file_of(tmp_path, GOOD, WRONG)
    done = cli("compare", f"{path}::wrong", "--html", tmp_path / "wrong.html")
    assert done.exit_code == 1 and done.output.startswith("NOT the same function")
    assert "wrong" in (tmp_path / "wrong.html").read_text(encoding="utf-8")
    good = cli("compare", f"{path}::layer[small]", "--json")
    assert good.exit_code == 0 and json.loads(good.stdout)["passed"] is True
    several = cli("compare", path)
    assert "means 3 cases; name one: " in str(several.exception) and f"{path}::layer[small]" in str(several.exception)


def test_what_the_command_line_says_wins_over_the_declaration(tmp_path):
    path = file_of(tmp_path, WRONG)
    result = parity.check_file(path, levels=["structure"], seed=7)
    assert result.passed and result.levels == ("structure",)
    assert result.cases[0].report.seed == 7


def test_parameters_are_those_of_the_port_where_none_are_to_be_copied(tmp_path):
    path = file_of(tmp_path, '@parity.pair\ndef own():\n    return made(5, transfer=False, levels=["weights"])\n')
    assert not parity.check_file(path).passed


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("1 / 0\n",), r"cases\.py raises ZeroDivisionError: division by zero \(.*cases\.py:\d+\)"),
        (("def f(:\n",), r"cases\.py raises SyntaxError"),
        (("import nowhere_to_be_found\n",), r"cases\.py raises ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ((), r"cases\.py declares no pair: put @parity\.pair above a function"),
        (("@parity.pair(each={})\ndef f(): ...\n",), r"each must be a dict from names of cases to keyword arguments, got \{\}"),
        (("@parity.pair(each={'a': 3})\ndef f(): ...\n",), r"each must be a dict .*, got \{'a': 3\}"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_in_one_sentence(tmp_path, parts, message):
    with pytest.raises(parity.InputError, match=message):
        parity.check_file(file_of(tmp_path, *parts))
    assert str(tmp_path) not in sys.path


def test_a_call_that_cannot_be_carried_out_is_told_in_one_sentence(tmp_path):
    with pytest.raises(parity.InputError, match=r"there is no file .*nowhere\.py; name a Python file"):
        parity.check_file(tmp_path / "nowhere.py")
    with pytest.raises(parity.InputError, match=r"is no Python file; its name must end with \.py"):
        parity.check_file(file_of(tmp_path, GOOD, name="cases.txt"))
    path = file_of(tmp_path, GOOD)
    known = r"no case of .* is called like 'other'; there are layer\[small\], layer\[large\]"
    with pytest.raises(parity.InputError, match=known):
        parity.check_file(path, module="other")
    with pytest.raises(parity.InputError, match="device must be cpu, gpu or all, got 'tpu'"):
        parity.check_file(path, device="tpu")
    assert "--full belong to the built-in suite" in str(cli("check", path, "--full").exception)
    with pytest.raises(parity.InputError, match=r"parity\.Pair has no option tolerance; parity\.compare has"):
        parity.Pair(None, None, tolerance=1)


# ----------------------------------------------------------------------------- pytest


@pytest.fixture
def plugged(pytester: pytest.Pytester):
    """Runs pytest with the plugin, in this process."""

    def run(*args: object, **files: str) -> pytest.RunResult:
        for name, text in files.items():
            (pytester.path / f"{name}.py").write_text(HEAD + text, encoding="utf-8")
        return pytester.runpytest_inprocess(*ARGS, "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *map(str, args))

    return run


TESTS = """
import pytest

def test_same(parity_check):
    pair = made(5)
    assert parity_check(pair.torch_model, pair.flax_model, *pair.args, levels=["identical"]).passed

@pytest.mark.parity(levels=["identical"], diagnose=False)
def test_other(parity_check):
    pair = made(5, scale=1.5)
    parity_check(pair.torch_model, pair.flax_model, *pair.args)

def test_unfit(parity_check):
    pair = made(5)
    parity_check(made(6).torch_model, pair.flax_model, *pair.args)
"""


def test_pytest_finds_the_same_pairs_and_shows_the_report_alone(plugged, tmp_path):
    target = tmp_path / "run.html"
    done = plugged("cases.py", "test_more.py", "--parity-report", target, cases=GOOD + WRONG + RAISES, test_more=TESTS)
    done.assert_outcomes(passed=3, failed=4)
    text = done.stdout.str()
    assert "NOT the same function" in text and "division by zero" in text
    # Nothing of a framework or of this package, but the line of the user's test.
    inner = [f"{name}{end}" for name in ("jax", "flax", "torch", "parity") for end in ("/_src/", "/nnx/", "/nn/", "/evidence/")]
    assert not [frame for frame in inner if frame in text]
    assert "parity_check(pair.torch_model, pair.flax_model, *pair.args)" in text
    assert "parity: torch" in text and "seed of each pair" in text
    page = target.read_text(encoding="utf-8")
    # The one whose parameters do not fit could not be compared, and stands there all the same.
    assert "3 of 7 cases agree" in page and "test_more.py::test_unfit" in page
    assert "test_more.py::test_other" in page and "layer[small]" in page


def test_pages_are_collected_from_all_workers(pytester, tmp_path):
    (pytester.path / "test_pairs.py").write_text(HEAD + GOOD, encoding="utf-8")
    done = pytester.runpytest_subprocess(*ARGS, "-n", "2", "--parity-report", str(tmp_path / "run.html"), timeout=300)
    done.assert_outcomes(passed=2)
    assert "2 of 2 cases agree" in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_options_that_cannot_be_are_refused_before_anything_runs(plugged, tmp_path):
    done = plugged("--parity-levels", "identity", cases=GOOD)
    assert done.ret == pytest.ExitCode.USAGE_ERROR and "no such level: 'identity'" in done.stderr.str()
    done = plugged("--parity-report", tmp_path, cases=GOOD)
    assert done.ret == pytest.ExitCode.USAGE_ERROR and "is a folder; give the name of a file" in done.stderr.str()


def test_a_missing_gpu_skips_and_says_so(plugged, monkeypatch):
    monkeypatch.setattr(declared, "no_gpu", lambda *_: "no card in this machine")
    done = plugged("cases.py", "-rs", "--parity-device", "gpu", cases=GOOD)
    done.assert_outcomes(skipped=2)
    assert "no card in this machine" in done.stdout.str()


def test_levels_and_seed_of_the_command_line_win(plugged):
    done = plugged("cases.py", "--parity-levels", "structure", "--parity-seed", "3", cases=WRONG)
    done.assert_outcomes(passed=1)
    assert "seed 3" in done.stdout.str()
