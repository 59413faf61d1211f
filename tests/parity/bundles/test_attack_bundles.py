"""Bundles in the hands of users who overwrite, leave out, rename, and have no room left."""

import json
import os
import sys

import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from test_bundle_file import edited

import parity
from parity import cli
from parity.bundles.file import FORM, VERSION

X = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3).eval()


def port():
    return parity.transfer(linear(), nnx.Linear(4, 3, rngs=nnx.Rngs(0))).value


class TorchSpare(torch.nn.Module):
    """Holds a layer that it does not use."""

    def __init__(self):
        super().__init__()
        self.up, self.spare = torch.nn.Linear(4, 3), torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.up(x)


class FlaxSpare(nnx.Module):
    def __init__(self, rngs):
        self.lift = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.lift(x)


SPARE = {"rename": {"up": "lift"}, "ignore": ["spare.*"]}


def spare_pair():
    torch.manual_seed(0)
    model = TorchSpare().eval()
    return model, parity.transfer(model, FlaxSpare(nnx.Rngs(0)), **SPARE).value


@pytest.fixture(scope="module")
def spare(tmp_path_factory):
    model, made = spare_pair()
    return parity.record(model, X, path=tmp_path_factory.mktemp("spare") / "spare.safetensors", gradients=False), made


def levels(report):
    return [level.level for level in report.levels]


def test_what_ignore_leaves_out_costs_the_level_wiring_and_not_the_verdict(spare):
    path, made = spare
    report = parity.replay(path, made, **SPARE)
    notes = [str(note) for note in report.notes if note.code == "recorded"]
    assert "wiring" not in levels(report) and notes[-1].endswith(
        "wiring is left out: the recorded torch model was proved exact with every array replaced, and ignore= leaves some out"
    )
    # Gradients were not recorded, which nobody may take for an agreement.
    assert report.verdict == "not proved"
    report = parity.replay(path, made, levels=["structure", "wiring"], **SPARE)
    assert [(one.level, one.status) for one in report.levels] == [("structure", "passed"), ("wiring", "not run")]
    report = parity.replay(path, made, levels=["weights", "structure", "identical"], **SPARE)
    assert report.passed


def test_two_bundles_of_a_pair_that_is_the_same_function_are_an_agreement(tmp_path):
    one = parity.record(linear(), X, path=tmp_path / "one.safetensors")
    other = parity.record(port(), X, path=tmp_path / "other.safetensors")
    report = parity.bundle_diff(one, other)
    assert report.passed and "wiring" not in levels(report)
    assert "causes inside torch's code" not in str(report)
    sets = [parity.InputSet("plain", "all", (X,), {}), parity.InputSet("large", "scales", (X * 100,), {})]
    path = parity.record(port(), sets, path=tmp_path / "sets.safetensors", gradients=False)
    report = parity.replay(path, linear(), diagnose=False)
    # The level that could not run is no failure of a set.
    assert [one.failed for one in report.sets] == [("gradients",), ("gradients",)]


def test_names_and_what_is_left_out_are_given_on_the_command_line(spare, tmp_path, monkeypatch, capsys):
    path, _ = spare
    (tmp_path / "names.json").write_text(json.dumps(SPARE["rename"]))
    (tmp_path / "their_port.py").write_text("import test_attack_bundles as t\n\ndef build():\n    return t.spare_pair()[1]\n")
    monkeypatch.chdir(tmp_path)
    words = ["replay", str(path), "their_port:build", "--levels", "weights,identical", "--json"]
    for more, status in ((["--rename", "names.json", "--ignore", "spare.*"], 0), ([], 1), (["--rename", "none.json"], 2)):
        monkeypatch.setattr(sys, "argv", ["parity", *words, *more])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == status and json.loads(capsys.readouterr().out)["passed"] is (status == 0)


# ------------------------------------------------------------------------------ places


def refused(path, **options):
    with pytest.raises(parity.InputError) as caught:
        parity.record(linear(), X, path=path, gradients=False, **options)
    return str(caught.value)


def test_a_file_of_weights_is_never_replaced(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": np.ones(2)}, path)
    assert "is a safetensors file that is no bundle, and is left as it is; give another name" in refused(path)
    with pytest.raises(parity.InputError, match="no bundle of parity's: it holds 1 arrays") as caught:
        parity.golden(linear(), X, path=path, update=True)
    assert caught.value.code == "no-bundle" and (load_file(path)["weight"] == 1).all()


def test_a_newer_golden_bundle_is_left_and_an_older_one_is_written_anew(tmp_path):
    path, options = tmp_path / "g.safetensors", {"gradients": False, "keep": "digests"}
    parity.record(linear(), X, path=path, **options)
    edited(path, lambda metadata: metadata.update({FORM: str(VERSION + 1)}))
    before = path.read_bytes()
    with pytest.raises(parity.InputError, match="update torch-flax-parity here") as caught:
        parity.golden(linear(), X, path=path, update=True, **options)
    assert caught.value.code == "bundle-newer" and path.read_bytes() == before
    edited(path, lambda metadata: metadata.update({FORM: "0"}))
    with pytest.raises(parity.InputError, match="no longer reads") as caught:
        parity.golden(linear(), X, path=path, **options)
    assert caught.value.code == "bundle-older"
    assert parity.golden(linear(), X, path=path, update=True, **options).passed


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (".", "there is a folder of that name; give another name, such as model.safetensors"),
        ("", "there is a folder of that name"),
        ("file/b.safetensors", "file is a file, not a folder; give a bundle another place"),
        ("locked/b.safetensors", "nothing may be written into locked; give a bundle another place"),
        ("no/such/b.safetensors", "there is no folder no; make it first"),
        ("b", "a bundle is a .safetensors file; name it b.safetensors"),
    ],
)
def test_a_place_where_no_bundle_can_stand_is_told_before_the_model_runs(tmp_path, monkeypatch, place, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir()
    # The superuser may write anywhere.
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: os.path.basename(path) != "locked" and allowed(path, mode))
    ran = []
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda *_: ran.append(1))
    told = refused(place, keep="most")
    assert said in told and "keep must be 'all'" in told and not ran


def test_an_interrupt_while_a_bundle_is_written_leaves_the_old_one(tmp_path, monkeypatch):
    path, options = tmp_path / "g.safetensors", {"gradients": False, "keep": "digests"}
    parity.record(linear(), X, path=path, **options)
    before = path.read_bytes()

    def interrupted(file, array):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("parity.weights.safetensors_file.put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parity.record(linear(), X, path=path, **options)
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "file-unreadable"),
        (lambda path: edited(path, lambda metadata: metadata.update({FORM: str(VERSION + 1)})), "bundle-newer"),
        (lambda path: edited(path, lambda metadata: metadata.update({FORM: "x"})), "file-unreadable"),
        (lambda path: edited(path, lambda metadata: metadata.update(seal="1"), reseal=False), ""),
        (lambda path: path.unlink(), "file-unreadable"),
    ],
)
def test_what_cannot_be_used_has_a_code_of_its_own(tmp_path, spoil, code):
    path = parity.record(linear(), X, path=tmp_path / "g.safetensors", gradients=False, keep="digests")
    spoil(path)
    if not code:
        assert parity.bundle_diff(path, path).passed
        return
    with pytest.raises(parity.InputError) as caught:
        parity.bundle_diff(path, path)
    assert caught.value.code == code and str(path) in str(caught.value)
    assert parity.refusal(caught.value, 2)["code"] in parity.REFUSALS
