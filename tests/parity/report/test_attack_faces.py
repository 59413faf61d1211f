"""Files and models of users that print, end the process, or declare what nobody would find."""

import json
import sys

import pytest

import parity
from parity import cli

HEAD = """
import numpy as np, parity, sys, torch
from flax import nnx

print("imported")

def made(**options):
    print("made")
    torch.manual_seed(0)
    x = np.ones((2, 4), np.float32)
    return parity.Pair(torch.nn.Linear(4, 3).eval(), nnx.Linear(4, 3, rngs=nnx.Rngs(0)), x, levels=["weights"], **options)

def factory(**options):
    @parity.pair
    def case():
        return made(**options)
    return case

def ends():
    sys.exit(0)

def breaks():
    raise RuntimeError("no such checkpoint")

class Needs:
    def __init__(self, width): ...
"""
PAIR = """
@parity.pair
def layer():
    return made()
"""


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command line beside files: exit status, what came out, what was said beside it."""

    def call(*argv, text=HEAD + PAIR):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "their_cases.py").write_text(text, encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["parity", *argv])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        sys.modules.pop("their_cases", None)
        return stopped.value.code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    import torch

    model = torch.nn.Linear(4, 3).eval()
    path = tmp_path_factory.mktemp("bundle") / "größe 100% <b>.safetensors"
    return parity.record(model, torch.ones(2, 4), path=path, gradients=False, keep="digests")


@pytest.mark.parametrize("command", [("check", "their_cases.py"), ("compare", "their_cases.py")])
def test_what_a_users_file_prints_stays_out_of_json(run, command):
    status, out, err = run(*command, "--json")
    assert status == 0 and json.loads(out)["passed"] is True
    assert "imported" in err and "made" in err
    # Without --json it stands where it is printed.
    assert run(*command)[1].startswith("imported\nmade\n")


def test_what_a_users_model_prints_stays_out_of_json(run, bundle):
    text = HEAD + "\ndef port():\n    print('built')\n    return made().flax_model\n"
    status, out, err = run("replay", str(bundle), "their_cases:port", "--levels", "structure", "--json", text=text)
    assert status == 0 and json.loads(out)["verdict"] and "built" in err
    status, out, err = run("transfer", "a.pt", "b.msgpack", "--like", "their_cases:ends", "--json")
    assert status == 2 and json.loads(out)["code"] == "no-model" and "imported" in err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("their_cases:ends", r"gives no model (SystemExit: 0 (at their_cases.py:20, in ends)); mend it there"),
        ("their_cases:breaks", "(RuntimeError: no such checkpoint (at their_cases.py:23, in breaks)); mend it there"),
        ("their_cases:Needs", "missing 1 required positional argument: 'width'); name a function without arguments"),
        ("their_cases:nothing", "has no attribute 'nothing'); name a function without arguments"),
        ("nowhere_at_all:build", "No module named 'nowhere_at_all'); install it, or name code that does without"),
    ],
)
def test_a_model_that_cannot_be_had_is_misuse_and_never_an_agreement(run, bundle, name, said):
    status, out, err = run("replay", str(bundle), name)
    assert status == 2 and "the same function" not in out and said in err and "Traceback" not in err
    status, out, _ = run("replay", str(bundle), name, "--json")
    assert status == 2 and json.loads(out)["code"] == "no-model"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (PAIR + PAIR, "layer in line 28 would not be compared: no name of the file holds it, or a later one took it"),
        (PAIR + "\nkept = [factory()]\n", "case in line 14 would not be compared"),
        (PAIR + "\nfactory()\nfactory()\n", "case in line 14 would not be compared"),
    ],
    ids=["a later one has its name", "in a list", "thrown away"],
)
def test_a_pair_that_nobody_would_find_is_told(run, pytester, monkeypatch, more, said):
    status, out, err = run("check", "their_cases.py", "--json", text=HEAD + more)
    assert status == 2 and said in err and json.loads(out)["code"] == "cases-file-loses"
    monkeypatch.chdir(pytester.path)
    (pytester.path / "their_pairs.py").write_text(HEAD + more, encoding="utf-8")
    done = pytester.runpytest_inprocess("their_pairs.py", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    assert done.ret == pytest.ExitCode.INTERRUPTED
    done.stdout.fnmatch_lines(["*ERROR collecting their_pairs.py*", f"*{said}*"])
    assert "pytest_plugin.py" not in done.stdout.str()


def test_pairs_that_a_factory_makes_have_the_names_of_the_file_on_both_faces(run, pytester, monkeypatch):
    more = "\nsmall = factory()\nlarge = factory(seed=1)\nwrapped = __import__('functools').wraps(small)(lambda: small())\n"
    status, out, _ = run("check", "their_cases.py", "--json", text=HEAD + more)
    assert status == 0 and [case["name"] for case in json.loads(out)["cases"]] == ["small", "large", "wrapped"]
    assert run("compare", "their_cases.py::large", text=HEAD + more)[0] == 0
    monkeypatch.chdir(pytester.path)
    (pytester.path / "their_pairs.py").write_text(HEAD + more, encoding="utf-8")
    done = pytester.runpytest_inprocess("their_pairs.py", "-v", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    done.assert_outcomes(passed=3)
    done.stdout.fnmatch_lines(["*::small PASSED*", "*::large PASSED*", "*::wrapped PASSED*"])


def test_a_factory_of_another_file_is_found_and_an_imported_pair_is_not_run_twice(run, tmp_path):
    (tmp_path / "their_factory.py").write_text(HEAD + PAIR, encoding="utf-8")
    more = "from their_factory import factory, layer\nmine = factory()\n"
    try:
        status, out, _ = run("check", "their_cases.py", "--json", text=more)
    finally:
        sys.modules.pop("their_factory", None)
    assert status == 0 and [case["name"] for case in json.loads(out)["cases"]] == ["mine"]


GOLDEN = """
import torch

class Moody(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        if self.factor is None:
            raise RuntimeError("no factor")
        return x * self.factor

x = torch.ones(2, 3)
options = dict(gradients=False, keep="digests")

def test_two(parity_golden):
    parity_golden(Moody(FACTOR).eval(), x, **options)
    parity_golden(Moody(2.0).eval(), x, **options)

def test_raises(parity_golden):
    parity_golden(Moody(None).eval(), x, **options)
"""


def test_every_golden_comparison_that_fails_is_on_the_page_and_two_of_a_test_have_a_bundle_each(pytester):
    options = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--parity-report", "run.html")
    pytester.makepyfile(test_moody=GOLDEN.replace("FACTOR", "1.0"))
    done = pytester.runpytest_inprocess(*options, "--parity-update-golden")
    done.assert_outcomes(passed=1, failed=1)
    # The user's own line, and no frame of a framework or of this package.
    done.stdout.fnmatch_lines(["*the model raises RuntimeError: no factor (at test_moody.py:*, in forward); mend it*"])
    assert "functional_call" not in done.stdout.str() and "record.py" not in done.stdout.str()
    names = sorted(path.name for path in (pytester.path / "golden").iterdir())
    assert names == ["test_moody-test_two-2.safetensors", "test_moody-test_two.safetensors"]
    pytester.makepyfile(test_moody=GOLDEN.replace("FACTOR", "1.5"))
    sys.modules.pop("test_moody", None)
    pytester.runpytest_inprocess(*options).assert_outcomes(failed=2)
    page = (pytester.path / "run.html").read_text(encoding="utf-8")
    assert "0 of 2 cases agree" in page and "output: values differ, 6 of 6" in page and "there is no golden bundle" in page


@pytest.mark.parametrize("kind", ["torch", "flax"])
def test_a_model_that_raises_while_it_is_recorded_is_told_in_one_sentence(tmp_path, kind):
    import numpy as np
    import torch
    from flax import nnx

    model = torch.nn.Linear(4, 3).eval() if kind == "torch" else nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    with pytest.raises(parity.InputError, match=r"cannot record: the model raises \w+: .*; mend it, or give arguments"):
        parity.record(model, np.ones((2, 5), np.float32), path=tmp_path / "b.safetensors")
    assert not list(tmp_path.iterdir())


def test_all_frameworks_that_are_missing_are_told_at_once(monkeypatch, tmp_path):
    import importlib.util

    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("torch", "flax") else known(name))
    (tmp_path / "cases.py").write_text(HEAD + PAIR, encoding="utf-8")
    with pytest.raises(parity.MissingFrameworkError, match=r"torch is not installed; .*; flax is not installed; "):
        parity.check_file(tmp_path / "cases.py")


def test_a_name_that_is_no_valid_text_costs_no_page(tmp_path):
    from parity.report.html import written

    page = written(tmp_path / "page.html", "<p>\ud800</p>")
    assert page.read_text(encoding="utf-8") == "<p>\\ud800</p>"
