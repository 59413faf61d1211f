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
