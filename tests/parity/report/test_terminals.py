"""Terminals, pipes and disks of all kinds: the verdict and its exit status stand, and nothing is lost."""

import errno
import io
import json
import os
import re
import subprocess
import sys
import unicodedata
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from report_helpers import failing, squeezed

import parity
from parity import cli
from parity.evidence.faults import Diagnosis, Difference, Isolated, Isolation
from parity.evidence.result import ArrayDiff, Diff, Divergence, Step, Trace

PLUGIN = () if any(e.name == "parity" for e in entry_points(group="pytest11")) else ("-p", "parity.pytest_plugin")
HEAD = """
import numpy as np, parity, torch
from flax import nnx

def made(n=3, **options):
    torch.manual_seed(n)
    x = np.ones((2, 4), np.float32)
    return parity.Pair(torch.nn.Linear(4, n).eval(), nnx.Linear(4, n, rngs=nnx.Rngs(0)), x, **options)
"""
# The level weights alone runs neither model.
GOOD = """
@parity.pair(each={"größe": {}})
def layer():
    return made(levels=["weights"])
"""
WRONG = """
@parity.pair
def wrong():
    return made(levels=["weights"], transfer=False)
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command line with streams of a given kind: exit status, what came out, what was said beside it."""
    monkeypatch.chdir(tmp_path)

    def call(*argv: str, encoding: str = "utf-8", out: Any = None, file: str = HEAD + GOOD) -> tuple[int, str, str]:
        Path("cases.py").write_text(file, encoding="utf-8")
        raw = io.BytesIO(), io.BytesIO()
        streams = [io.TextIOWrapper(one, encoding=encoding, write_through=True) for one in raw]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["parity", *argv])
            patch.setattr(sys, "stdout", out or streams[0])
            patch.setattr(sys, "stderr", streams[1])
            with pytest.raises(SystemExit) as stopped:
                cli.main()
        return stopped.value.code, *(one.getvalue().decode(encoding) for one in raw)

    return call


COMMANDS = [("check", "cases.py"), ("compare", "cases.py::layer[größe]")]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"COLUMNS": "40"}, {"PYTHONIOENCODING": "ascii"}])
def test_a_poor_terminal_shows_the_verdict_without_codes_of_control(run, monkeypatch, command, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    status, out, _ = run(*command)
    assert status == 0 and "\x1b" not in out
    assert "1 of 1 cases agree" in out if command[0] == "check" else "agree on what was asked" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_letters_that_a_terminal_lacks_become_escapes(run, command):
    status, out, err = run(*command, encoding="ascii")
    assert status == 0 and "UnicodeEncodeError" not in err
    if command[0] == "check":
        # The table has names of functions; the name of the case is told where it fails.
        status, out, _ = run("check", "cases.py", encoding="ascii", file=HEAD + WRONG.replace("wrong", "größer"))
        assert status == 1 and "gr\\xf6\\xdfer" in out


def test_a_locale_without_utf_8_is_no_obstacle():
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONPATH": str(Path(parity.__file__).parents[1])}
    command = [sys.executable, "-c", "from parity.cli import main; main()", "codes"]
    done = subprocess.run([*command, "größe"], env={**os.environ, **locale}, capture_output=True, check=False)
    assert done.returncode == 2 and b"no such kind of code: '" in done.stderr and b"Traceback" not in done.stderr
    done.stderr.decode("ascii")


@pytest.mark.parametrize("columns", [40, 80])
def test_nothing_is_lost_in_a_narrow_terminal(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    status, out, _ = run("check", "cases.py", file=HEAD + GOOD + WRONG)
    assert status == 1
    assert "1 of 2 cases agree" in out and "NOT the same function" in out and "weight: 12 of 12 values differ" in out
    rows = [line for line in out.splitlines() if re.match(r"(layer|wrong)\b.*\d/\d", line)]
    assert [re.findall(r"\d/\d", row) for row in rows] == [["1/1"], ["0/1"]]


def test_what_is_printed_in_a_real_narrow_terminal_is_no_wider(monkeypatch):
    """Of the suite's text each line is broken between words; the table becomes a line for each module."""
    from rich.console import Console

    from parity.suite import CaseResult, SuiteResult

    shown = io.StringIO()
    screen = Console(file=shown, width=40, force_terminal=True, no_color=True, color_system=None)
    monkeypatch.setattr(cli, "Screen", lambda: screen)
    result = SuiteResult((CaseResult("case", "Module", "cpu", failing()),), ("identical",), environment=parity.environment())
    cli.show(result)
    text = re.sub(r"\x1b\[\d*m", "", shown.getvalue())
    assert max(map(len, text.splitlines())) <= 40
    for word in squeezed(str(failing())).split():
        assert word in text.replace("\n", "") or word in squeezed(text)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this machine")
@pytest.mark.parametrize(("command", "file", "status"), [(COMMANDS[0], GOOD, 0), (("compare", "cases.py"), WRONG, 1)])
def test_a_result_that_cannot_be_printed_is_told_and_its_exit_status_stands(run, command, file, status):
    with open("/dev/full", "w", encoding="utf-8") as full:
        found, _, err = run(*command, out=full, file=HEAD + file)
    assert found == status
    assert "parity: the result could not be printed: No space left on device" in err


@pytest.mark.parametrize(
    ("command", "file", "status"), [(COMMANDS[0], GOOD, 0), (("compare", "cases.py"), WRONG, 1), (("codes",), GOOD, 0)]
)
def test_a_reader_that_has_gone_does_not_change_the_exit_status(run, command, file, status):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as gone:
        found, _, err = run(*command, out=gone, file=HEAD + file)
    assert found == status and "Traceback" not in err and "Broken" not in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_that_cannot_be_written_does_not_cost_the_verdict(run, monkeypatch, tmp_path, command):
    def full(self: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    page = tmp_path / "page.html"
    page.write_text("old", encoding="utf-8")
    file = HEAD + GOOD
    (tmp_path / "cases.py").write_text(file, encoding="utf-8")
    kept = Path.write_text
    # The disk is full once the work is done.
    monkeypatch.setattr(
        Path, "write_text", lambda self, *a, **k: full(self) if self.suffix == ".partial" else kept(self, *a, **k)
    )
    status, out, err = run(*command, "--html", str(page), file=file)
    assert status == 0
    assert "agree" in out
    assert re.search(r"parity: .*page\.html could not be written: No space left on device; it is as it was before", err)
    monkeypatch.undo()
    assert page.read_text(encoding="utf-8") == "old" and sorted(p.name for p in tmp_path.iterdir())[:2] == [
        "cases.py",
        "page.html",
    ]


PLACES = [
    ("folder", "is a folder; give the name of a file in it, such as .*report.html"),
    ("nowhere/page.html", "there is no folder nowhere; make it first"),
    ("cases.py/page.html", "cases.py is a file, not a folder; give a page another place"),
    ("pipe", "is no file that a page could replace; give the name of one"),
    ("locked/page.html", "nothing may be written into locked; give a page another place"),
]


@pytest.mark.parametrize(("place", "said"), PLACES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_can_hold_no_page_is_refused_before_any_work(run, monkeypatch, command, place, said, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "locked").mkdir()
    os.mkfifo(tmp_path / "pipe")
    # The superuser may write anywhere.
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked" and allowed(path, mode))
    status, out, err = run(*command, "--html", place)
    assert status == 2 and not out
    assert re.search(said, squeezed(err))
    status, out, _ = run(*command, "--html", place, "--json")
    told = json.loads(out)
    assert status == told["status"] == 2 and told["code"] == "file-unwritable" and re.search(said, told["message"])


# ----------------------------------------------------------------------------- files of cases

FILES = {
    "raises": ("1 / 0\n", r"cases\.py raises ZeroDivisionError: division by zero \(.*cases\.py:\d+\)", "cases-file-raises"),
    "syntax": ("def f(:\n", r"cases\.py raises SyntaxError: .* \(.*cases\.py:\d+\)", "cases-file-raises"),
    "ends the process": ("raise SystemExit(0)\n", r"cases\.py raises SystemExit: 0 \(.*cases\.py:\d+\)", "cases-file-raises"),
    "no pair": ("", r"cases\.py declares no pair: put @parity\.pair above a function", "cases-file-empty"),
    "missing": (None, r"there is no file .*nowhere\.py; name a Python file", "file-missing"),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("command", ["check", "compare"])
def test_a_file_of_cases_that_cannot_be_used_is_told_and_exits_2(run, command, kind):
    text, said, code = FILES[kind]
    name = "nowhere.py" if text is None else "cases.py"
    status, out, err = run(command, name, file=HEAD + (text or ""))
    assert (status, out) == (2, "") and re.search(said, squeezed(err)) and "Traceback" not in err
    status, out, _ = run(command, name, "--json", file=HEAD + (text or ""))
    told = json.loads(out)
    assert (status, told["kind"], told["code"]) == (2, "refusal", code) and re.search(said, told["message"])


def test_a_pair_that_raises_does_not_cost_the_others(run):
    raising = "\n@parity.pair\ndef ends():\n    raise SystemExit(0)\n"
    raising += "\n@parity.pair\ndef odd():\n    return made(levels=['weights'], rename=3)\n"
    status, out, _ = run("check", "cases.py", "--json", file=HEAD + GOOD + raising)
    cases = {case["name"]: case for case in json.loads(out)["cases"]}
    assert status == 1 and cases["layer[größe]"]["passed"]
    assert cases["ends"]["code"] == "pair-raises" and "the function raises SystemExit: 0" in cases["ends"]["error"]
    assert not cases["odd"]["passed"] and cases["odd"]["error"] and cases["odd"]["code"]


PYTEST = {
    "raises": ("ZeroDivisionError: division by zero", pytest.ExitCode.INTERRUPTED),
    "syntax": ("SyntaxError", pytest.ExitCode.INTERRUPTED),
    "no pair": ("no tests ran", pytest.ExitCode.NO_TESTS_COLLECTED),
    "missing": ("file or directory not found: nowhere.py", pytest.ExitCode.USAGE_ERROR),
}


@pytest.mark.parametrize("kind", PYTEST)
def test_pytest_tells_the_same_of_such_a_file(pytester, kind):
    text, (said, status) = FILES[kind][0], PYTEST[kind]
    pytester.makepyfile(cases="import parity\n" + (text or ""))
    done = pytester.runpytest_inprocess(
        "nowhere.py" if text is None else "cases.py", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"
    )
    shown = done.stdout.str() + done.stderr.str()
    assert done.ret == status and said in shown
    if text:
        # The user's own line, and no frame of this package.
        assert "cases.py" in shown and "parity/declared.py" not in shown


def test_a_page_of_a_run_of_pytest_that_cannot_be_written_costs_no_outcome(pytester, monkeypatch):
    pytester.makepyfile(cases=HEAD + GOOD + WRONG)
    kept = Path.write_text

    def full(self: Path, *given: Any, **options: Any) -> int:
        if self.suffix == ".partial":
            raise OSError(errno.ENOSPC, "No space left on device")
        return kept(self, *given, **options)

    monkeypatch.setattr(Path, "write_text", full)
    done = pytester.runpytest_inprocess(
        *PLUGIN, "cases.py", "--parity-report", "run.html", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"
    )
    done.assert_outcomes(passed=1, failed=1)
    shown = done.stdout.str()
    assert "NOT the same function" in shown and "weight: 12 of 12 values differ" in shown
    assert "run.html could not be written: No space left on device" in shown


# ----------------------------------------------------------------------------- options of a comparison


def test_options_of_the_command_line_reach_the_comparison(run, monkeypatch):
    given: list[dict[str, Any]] = []
    known = parity.declared.compare

    def seen(*args: Any, **options: Any) -> Any:
        given.append(options)
        return known(*args, **options)

    monkeypatch.setattr(parity.declared, "compare", seen)
    options = ["--diagnose-seconds", "7", "--modes", "eager", "--strict", "--no-diagnose"]
    for command in COMMANDS:
        assert run(*command, *options)[0] == 0
    told = {"diagnose_seconds": 7.0, "modes": ["eager"], "strict": True, "diagnose": False}
    assert [{name: one[name] for name in told} for one in given] == [told, told]
    given.clear()
    run(*COMMANDS[1])
    assert not set(given[0]) & set(told)


def test_the_time_for_causes_reaches_pairs_and_the_fixture_of_pytest(pytester, monkeypatch):
    given: list[dict[str, Any]] = []
    known = parity.declared.compare
    monkeypatch.setattr(parity.declared, "compare", lambda *args, **options: given.append(options) or known(*args, **options))
    inside = "\ndef test_it(parity_check):\n    one = made(levels=['weights'])\n"
    inside += "    parity_check(one.torch_model, one.flax_model, *one.args, levels=['weights'])\n"
    pytester.makepyfile(test_cases=HEAD + GOOD + inside)
    done = pytester.runpytest_inprocess(
        *PLUGIN, "--parity-diagnose-seconds", "3.5", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"
    )
    done.assert_outcomes(passed=2)
    assert [one["diagnose_seconds"] for one in given] == [3.5, 3.5]


def test_options_that_cannot_be_are_told(run):
    status, _, err = run("check", "--diagnose-seconds", "7", "--no-diagnose")
    assert status == 2 and "--no-diagnose and --diagnose-seconds belong to pairs of your own" in squeezed(err)
    status, out, _ = run("compare", "cases.py", "--diagnose-seconds", "0", "--json")
    assert status == 2 and "diagnose_seconds must be a positive number, got 0.0" in json.loads(out)["message"]
    with pytest.raises(parity.InputError, match=r"check_file has no option tolerance; parity\.compare has"):
        parity.check_file("cases.py", options={"tolerance": 1})


@pytest.mark.parametrize("command", COMMANDS)
def test_versions_and_settings_are_printed_where_they_are_asked_for(run, command):
    status, out, _ = run(*command, "--show-env")
    assert status == 0
    for name, value in parity.environment().items():
        assert re.search(rf"^{re.escape(name)}\s+{re.escape(value)}$", out, re.MULTILINE), name
    assert "jax random numbers" not in run(*command)[1]


def test_the_other_commands_print_what_they_are_asked_for(run):
    assert json.loads(run("schema")[1])["$schema"].startswith("https://json-schema.org")
    assert json.loads(run("env", "--json")[1])["kind"] == "environment"
    assert "refusal: file-missing: there is no such file or folder" in run("codes", "refusal")[1].splitlines()
    assert json.loads(run("codes", "next", "--json")[1])["codes"][0]["kind"] == "next"
    assert run("codes", "--markdown")[1] == parity.codes_page()


# ---------------------------------------------------------------- what a stranger's file may hold

HOSTILE = "norm\x1b[2J\x9b31m\u202eyalp\r"


def test_names_that_would_write_elsewhere_on_the_terminal_are_told_by_their_numbers():
    divergence = Divergence(HOSTILE, 0, "", None, reason=f"expected (torch) {HOSTILE}, actual (flax) 1")
    trace = Trace((Step(HOSTILE, 0, False, divergence=divergence),), (HOSTILE,))
    plain = r"norm\x1b[2J\x9b31m\u202eyalp\x0d"
    assert str(trace).count(plain) == 3
    wrong = Isolated(HOSTILE, 0, HOSTILE, "name", "differs", 2.0, (Difference("output", 2.0, reason=HOSTILE),))
    isolation = Isolation((wrong,), (HOSTILE,))
    diff = Diff((ArrayDiff(HOSTILE, False, reason=HOSTILE),))
    for text in (str(trace), str(isolation), str(Diagnosis((), isolation)), str(diff), str(parity.InputError(HOSTILE))):
        assert plain in text
        assert not any(unicodedata.category(letter).startswith("C") for letter in text if letter != "\n"), repr(text)
    # In data they stand as they are.
    assert trace.to_dict()["steps"][0]["path"] == HOSTILE
