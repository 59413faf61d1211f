"""The plan of a transfer that is refused, its text at every width, and the command line around it."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import FlaxPair, TorchPair, listing
from flax import nnx
from transfer_helpers import scramble, snapshot

import parity
from parity import TransferError
from parity.report.plan import folded
from parity.weights.plan import Unpaired, draft

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
PARTLY = {"dense.weight": torch.ones(4, 4), "dense.bias": torch.ones(4), "nrm.bias": torch.ones(4)}


def planned(source=PARTLY, target=None, **options):
    return parity.transfer(source, FlaxPair() if target is None else target, dry=True, **options)


# ---------------------------------------------------------------- what a refused plan shows


def test_a_refused_plan_has_the_pairs_and_the_leaves_without_counterpart():
    plan = planned()
    assert plan.rename == {"dense.weight": "dense.kernel", "dense.bias": "dense.bias"}
    assert [(one.side, one.path, one.shape, one.dtype, one.nearest) for one in plan.unpaired] == [
        ("source", "nrm.bias", (4,), "float32", ("norm.bias",)),
        ("target", "norm.scale", (4,), "float32", ()),
        ("target", "norm.bias", (4,), "float32", ("nrm.bias",)),
    ]
    assert {one.reason for one in plan.unpaired} <= set(plan.problems)
    assert not plan.passed
    assert plan.value is None


def test_a_refused_plan_says_everything_in_words_and_in_data():
    lines = str(planned()).splitlines()
    for line in (
        "  dense.weight -> dense.kernel  transposed, (4, 4) float32, 64 bytes",
        "refused, nothing is written: 3 problems",
        "  - nrm.bias (4,) of the source has no counterpart in the target; nearest name: norm.bias",
        "  - norm.scale (4,) of the target gets nothing from the source",
    ):
        assert line in lines, line
    assert lines[-1] == "2 arrays, 80 bytes, planned only; without counterpart: 1 of the source, 2 of the target"
    data = json.loads(json.dumps(planned().to_dict()))
    assert data["unpaired"][0] == {
        "side": "source",
        "path": "nrm.bias",
        "shape": [4],
        "dtype": "float32",
        "reason": "nrm.bias (4,) of the source has no counterpart in the target; nearest name: norm.bias",
        "nearest": ["norm.bias"],
    }
    assert (data["arrays"], data["bytes"], data["passed"]) == (2, 80, False)


def test_the_error_of_a_refused_transfer_has_the_plan():
    with pytest.raises(TransferError) as error:
        parity.transfer(PARTLY, FlaxPair())
    assert error.value.plan == planned()


def test_shapes_that_do_not_fit_and_casts_are_problems_of_the_plan():
    plan = planned({**TorchPair().state_dict(), "dense.bias": torch.ones(5), "norm.bias": torch.ones(4).half()})
    assert any(problem.startswith("dense.bias has shape (5,)") for problem in plan.problems)
    assert any(problem.startswith("norm.bias is float16 and norm.bias float32") for problem in plan.problems)
    assert plan.unpaired == ()


def test_names_that_are_not_certain_are_shown_with_those_that_are(tmp_path):
    torch.save(TorchPair().state_dict(), tmp_path / "a.pt")
    plan = planned(tmp_path / "a.pt", tmp_path / "b.msgpack")
    assert plan.rename == {"dense.bias": "dense.bias", "norm.bias": "norm.bias"}
    assert [one.path for one in plan.unpaired] == ["dense.weight", "norm.weight"]
    assert "its name alone does not tell what Flax calls it, or in which layout" in plan.unpaired[0].reason
    assert any("give the names of the target with like (--like)" in problem for problem in plan.problems)
    assert not any("ignore=" in problem for problem in plan.problems)
    assert not (tmp_path / "b.msgpack").exists()


def test_a_target_that_exists_is_a_problem_of_the_plan(tmp_path):
    (tmp_path / "b.pt").write_bytes(b"mine")
    plan = planned(TorchPair(), tmp_path / "b.pt")
    assert len(plan.plan) == 4
    assert "b.pt exists; pass overwrite=True (--overwrite) to replace it" in plan.problems[0]


@pytest.mark.parametrize("target", ["tree", "file"])
def test_a_plan_of_names_alone_says_which_of_them_decided(target, tmp_path):
    torch.save(TorchPair().state_dict(), tmp_path / "a.pt")
    parity.transfer(FlaxPair(), tmp_path / "like.msgpack")
    like = {"like": tmp_path / "like.msgpack"} if target == "file" else {}
    plan = planned(tmp_path / "a.pt", nnx.state(FlaxPair()) if target == "tree" else tmp_path / "b.msgpack", **like)
    assert {entry.decided_by for entry in plan.plan} == {"name"}
    assert "  norm.weight  -> norm.scale  as is by name, (4,) float32, 16 bytes" in str(plan).splitlines()
    assert "  dense.bias   -> dense.bias  as is, (4,) float32, 16 bytes" in str(plan).splitlines()


# ---------------------------------------------------------------- suggestions


def test_near_misses_are_suggested_once_each_and_only_if_free():
    def alone(side, path, *nearest):
        return Unpaired(side, path, (1,), "float32", "", nearest)

    sources = [alone("source", "nrm", "norm"), alone("source", "nom", "norm"), alone("source", "x", "taken")]
    targets = [alone("target", "norm", "nrm"), alone("target", "kernels", "krnls"), alone("target", "z")]
    assert draft({"a": "taken"}, sources + targets) == {"a": "taken", "nrm": "? norm", "krnls": "? kernels"}


def test_confirmed_suggestions_carry_the_transfer(tmp_path):
    source = {**PARTLY, "nrm.weight": torch.full((4,), 3.0)}
    names = planned(source).draft
    (tmp_path / "r.json").write_text(json.dumps(names))
    with pytest.raises(parity.InputError, match=r'2 suggestions that nobody confirmed, such as "nrm\.bias": "\? norm\.bias"'):
        parity.transfer(source, FlaxPair(), rename=tmp_path / "r.json")
    (tmp_path / "r.json").write_text(json.dumps(names).replace("? ", ""))
    done = parity.transfer(source, FlaxPair(), rename=tmp_path / "r.json")
    assert done.rename["nrm.weight"] == "norm.scale"


def test_thousands_of_leaves_without_counterpart_are_told_in_seconds():
    names = [f"layers.{i}.{part}.weight" for i in range(500) for part in ("query", "key", "value", "out")]
    begin = time.process_time()
    plan = planned(dict.fromkeys(names, torch.ones(1)), {f"h.{name}": torch.ones(1) for name in names})
    assert len(plan.unpaired) == 4000
    assert plan.unpaired[0].nearest == ("h." + plan.unpaired[0].path,)
    # With every pair of names compared in full it was hours.
    assert time.process_time() - begin < 60


# ---------------------------------------------------------------- text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(width):
    deep = "encoder.block.transformer.layers.11.attention.self_attention.query_projection"
    plan = planned({f"{deep}.{name}": tensor for name, tensor in TorchPair().state_dict().items()})
    text = plan.text(width)
    assert max(map(len, text.splitlines())) <= width
    assert "".join(text.split()) == "".join(str(plan).split())


def test_a_plan_that_fits_is_a_table_and_one_that_does_not_is_stacked():
    plan = planned(TorchPair().state_dict())
    assert plan.text(80) == str(plan)
    assert plan.text(36).splitlines()[:7] == [
        "  dense.weight",
        "    -> dense.kernel",
        "    transposed, (4, 4) float32, 64",
        "    bytes",
        "  dense.bias",
        "    -> dense.bias",
        "    as is, (4,) float32, 16 bytes",
    ]


def test_lines_are_broken_after_spaces_and_dots():
    assert folded("encoder.layers.0 is long", 20, "- ", "  ") == ["- encoder.layers.0", "  is long"]
    assert folded("a.bbbbbbbb.cccccccc.dddddddd", 20) == ["a.bbbbbbbb.cccccccc.", "dddddddd"]
    assert folded("x" * 50, 20, "", "  ") == ["x" * 20, "  " + "x" * 18, "  " + "x" * 12]
    assert folded("x" * 50, None) == ["x" * 50]


# ---------------------------------------------------------------- the command


def command(*argv, cwd, **options):
    return subprocess.run(
        [sys.executable, "-m", "parity.cli", *argv],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=cwd,
        check=False,
        **options,
    )


def test_a_refused_plan_is_printed_and_exits_1(tmp_path):
    torch.save(PARTLY, tmp_path / "c.pt")
    parity.transfer(FlaxPair(), tmp_path / "like.msgpack")
    before = listing(tmp_path)
    argv = ("transfer", "c.pt", "d.msgpack", "--like", "like.msgpack", "--plan")
    done = command(*argv, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("  dense.weight -> dense.kernel  transposed by name")
    assert "nearest name: norm.bias" in done.stdout
    data = command(*argv, "--json", cwd=tmp_path)
    assert (data.returncode, data.stderr) == (1, "")
    assert json.loads(data.stdout)["unpaired"][0]["nearest"] == ["norm.bias"]
    assert listing(tmp_path) == before


def test_the_version_is_told(tmp_path):
    done = command("--version", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("parity 0.")


SLOW = """
import sys, time
from parity.weights import transfer
from parity import cli
original, asked = transfer.travelled, []
def slow(*args):
    asked.append(args)
    if len(asked) == 3:
        print("half", flush=True)
        time.sleep(60)
    return original(*args)
transfer.travelled = slow
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("end", ["b.safetensors", "b.pt", "b"])
def test_a_signal_leaves_nothing(number, end, tmp_path):
    torch.save(TorchPair().state_dict(), tmp_path / "a.pt")
    argv = [sys.executable, "-c", SLOW, "transfer", "a.pt", end]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT, cwd=tmp_path) as process:
        assert process.stdout.readline() == "half\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    assert list(listing(tmp_path)) == ["a.pt"]
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


PATIENT = "from parity import cli; cli.LateBar.PATIENCE = {}; cli.main()"


@pytest.mark.parametrize(
    ("patience", "options", "shown"),
    [(0, [], True), (60, [], False), (0, ["--quiet"], False), (0, ["--json"], False)],
    ids=["long", "short", "quiet", "json"],
)
def test_the_bar_is_for_long_work_on_a_terminal(patience, options, shown, tmp_path):
    source = scramble(TorchPair(), "bar")
    parity.transfer(source, tmp_path / "a.pt")
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-c", PATIENT.format(patience), "transfer", "a.pt", "b.pt", *options]
    environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=theirs, env=environment, cwd=tmp_path) as process:
        os.close(theirs)
        drawn = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:
                break
            if not piece:
                break
            drawn += piece
        out = process.stdout.read()
    os.close(ours)
    assert process.returncode == 0
    assert (b"bytes" in drawn) is shown, drawn
    assert bool(out) is (options != ["--quiet"])
    assert snapshot(torch.load(tmp_path / "b.pt")) == snapshot(source)
