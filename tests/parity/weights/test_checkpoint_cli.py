"""`parity transfer` on the command line."""

import json
import sys

import pytest
import torch
from checkpoint_helpers import FlaxPair, Tied, TorchPair
from transfer_helpers import scramble, snapshot

import parity
from parity import cli


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    parity.transfer(scramble(TorchPair(), "cli"), "a.pt")
    parity.transfer(FlaxPair(), "like.msgpack")

    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["parity", "transfer", *argv])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        return stopped.value.code, captured.out, captured.err

    return call


def test_a_conversion_exits_0_with_the_plan(run, tmp_path):
    code, out, err = run("a.pt", "b.safetensors", "--verify")
    assert (code, err) == (0, "")
    assert out.endswith("\n4 arrays, 112 bytes, all copied\n")
    assert "  read back: bit-equal" in out.splitlines()
    state = parity.transfer(tmp_path / "b.safetensors", TorchPair()).value
    assert snapshot(state) == snapshot(scramble(TorchPair(), "cli"))


def test_a_lost_tie_exits_1(run, tmp_path):
    parity.transfer(Tied(), tmp_path / "tied.pt")
    code, out, _ = run("tied.pt", "tied.safetensors")
    assert code == 0
    parity.transfer(Tied(), tmp_path / "like2.msgpack")
    code, out, _ = run("tied.pt", "tied.msgpack", "--like", "like2.msgpack")
    assert code == 1
    assert "tie lost: embed.weight and head.weight are one array" in out


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["none.pt", "b.pt"], 2, "parity: none.pt cannot be read: No such file or directory; check the path"),
        (["a.pt", "like.msgpack", "--like", "like.msgpack"], 1, "like.msgpack exists; pass overwrite=True (--overwrite)"),
        (["a.pt", "b.msgpack"], 1, "give the names of the target with like (--like)"),
        (["a.pt", "b.xyz"], 2, "says no kind of checkpoint by its end"),
        (["a.pt", "b.pt", "--like", "nowhere:make"], 2, "--like nowhere:make gives no model (ModuleNotFoundError"),
        (["a.pt", "b.pt", "--rename", "no.json"], 2, "no.json cannot be read"),
        (["a.pt", "b.pt", "--save-rename", "like.msgpack"], 2, "like.msgpack exists; pass --overwrite"),
        (["a.pt", "b.pt", "--cast", "int3"], 2, "cast must be None"),
        (["a.pt", "b.pt", "--save-rename", "no/where.json"], 2, "there is no folder no; make it first"),
        (["a.pt", "b.pt", "--rename", "open.json"], 2, 'suggestions that nobody confirmed, such as "nrm": "? norm"'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_is_one_message_and_writes_nothing(run, tmp_path, argv, status, words):
    (tmp_path / "open.json").write_text('{"nrm": "? norm"}')
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    code, out, err = run(*argv)
    assert (code, out) == (status, "")
    assert words in err
    assert err.startswith("parity: ")
    assert "Traceback" not in err
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_plan_shows_layouts_and_writes_nothing(run, tmp_path):
    code, out, _ = run("a.pt", "b.msgpack", "--like", "like.msgpack", "--plan")
    assert code == 0
    assert "dense.weight -> dense.kernel  transposed by name, (4, 4) float32, 64 bytes" in out
    assert "  4 layouts were decided by name, no layer type being known" in out
    assert not (tmp_path / "b.msgpack").exists()


def test_like_may_be_a_function(run, tmp_path):
    (tmp_path / "models_of_mine.py").write_text("from checkpoint_helpers import FlaxPair\ndef make():\n    return FlaxPair()\n")
    code, out, err = run("a.pt", "b.msgpack", "--like", "models_of_mine:make", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert {entry["decided_by"] for entry in data["plan"]} == {"rule"}
    assert data["passed"] is True
    assert str(tmp_path) not in sys.path


def test_a_refused_transfer_prints_its_plan_as_json_too(run, tmp_path):
    code, out, err = run("a.pt", "b.msgpack", "--json")
    data = json.loads(out)
    assert (code, data["passed"]) == (1, False)
    assert data["problems"] and all(problem in err for problem in data["problems"])
    assert not (tmp_path / "b.msgpack").exists()


def test_names_can_be_saved_edited_and_applied(run, tmp_path):
    assert run("a.pt", "b.pt", "--plan", "--save-rename", "names.json")[0] == 0
    names = json.loads((tmp_path / "names.json").read_text())
    assert names == {name: name for name in TorchPair().state_dict()}
    names["dense.weight"] = "out.matrix"
    (tmp_path / "names.json").write_text(json.dumps(names))
    assert run("a.pt", "b.pt", "--rename", "names.json")[0] == 0
    assert set(torch.load(tmp_path / "b.pt")) == {"out.matrix", "dense.bias", "norm.weight", "norm.bias"}


def test_a_refused_transfer_saves_the_names_that_fit_and_suggests_others(run, tmp_path):
    torch.save({"dense.weight": torch.ones(4, 4), "dense.bias": torch.ones(4), "nrm.bias": torch.ones(4)}, tmp_path / "c.pt")
    code, _, err = run("c.pt", "d.msgpack", "--like", "like.msgpack", "--save-rename", "names.json")
    assert code == 1
    assert "nrm.bias (4,) of the source has no counterpart in the target; nearest name: norm.bias" in err
    names = {"dense.weight": "dense.kernel", "dense.bias": "dense.bias", "nrm.bias": "? norm.bias"}
    assert json.loads((tmp_path / "names.json").read_text()) == names
    assert not (tmp_path / "d.msgpack").exists()


def test_names_that_nothing_is_known_of_are_not_saved_and_that_is_told(run, tmp_path):
    torch.save({"zzz": torch.ones(3)}, tmp_path / "c.pt")
    code, _, err = run("c.pt", "d.msgpack", "--like", "like.msgpack", "--save-rename", "names.json")
    assert code == 1 and not (tmp_path / "names.json").exists()
    assert "names.json was not written: no name fits one of the other side, and none is near to one" in err


def test_casts_and_ignored_leaves(run, tmp_path):
    code, out, _ = run("a.pt", "b.pt", "--cast", "bfloat16", "--ignore", "norm.*", "--ignore", "*.bias")
    assert code == 0
    assert "left out: norm.weight" in out
    assert {(k, v.dtype) for k, v in torch.load(tmp_path / "b.pt").items()} == {("dense.weight", torch.bfloat16)}
    code, _, _ = run("a.pt", "b.pt", "--overwrite")
    assert code == 0
    assert len(torch.load(tmp_path / "b.pt")) == 4
