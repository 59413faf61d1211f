"""An interrupted run leaves the old file or none; what is written is read back; memory stays small."""

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_helpers import FlaxPair, TorchPair, listing
from flax import nnx
from transfer_helpers import Holder, scramble, snapshot

import parity
from parity import InputError, TransferError
from parity.weights import checkpoint, files, msgpack_file, safetensors_file

ENDS = [".safetensors", ".pt", ".msgpack", ".orbax", ""]
ROOT = Path(__file__).parents[3]


def written(end, folder):
    """An old checkpoint of that kind, and a source for a new one."""
    path = folder / f"a{end}"
    parity.transfer(scramble(TorchPair(), "old"), path)
    return path, scramble(TorchPair(), "new")


class BrokenError(Exception):
    pass


def break_at(monkeypatch, number, error):
    """Let the array of that number fail when it is asked for."""
    asked = []
    original = parity.weights.transfer.travelled

    def broken(*args):
        asked.append(args)
        if len(asked) == number:
            raise error
        return original(*args)

    monkeypatch.setattr("parity.weights.transfer.travelled", broken)


@pytest.mark.parametrize("old", [True, False], ids=["old", "none"])
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end or "folder")
@pytest.mark.parametrize("error", [BrokenError(), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_interrupted_run_leaves_the_old_file_or_none(end, old, error, tmp_path, monkeypatch):
    path, source = written(end, tmp_path)
    if not old:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = listing(tmp_path)
    for number in (1, 3):
        with monkeypatch.context() as patch:
            break_at(patch, number, error)
            with pytest.raises(type(error)):
                parity.transfer(source, path, overwrite=True)
        assert listing(tmp_path) == before
        assert old or not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", [".safetensors", ".msgpack", ""])
def test_a_disk_that_fills_up_is_told_and_leaves_the_old_file(end, tmp_path, monkeypatch):
    path, source = written(end, tmp_path)
    before = listing(tmp_path)

    def full(file, array):
        file.write(b"x" * 10)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(msgpack_file if end == ".msgpack" else safetensors_file, "put", full)
    with pytest.raises(InputError, match=r"could not be written: No space left on device; it is as it was before"):
        parity.transfer(source, path, overwrite=True)
    assert listing(tmp_path) == before


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1000, 900, 100))
    with pytest.raises(InputError, match=r"takes 112 bytes and .* has 100 left; make room there"):
        parity.transfer(TorchPair(), tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a limit on file sizes, as Linux has")
def test_a_real_limit_of_the_system_is_told_too(tmp_path):
    code = f"""
    import resource, signal, sys
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    import numpy as np, torch, parity
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    for end in (".safetensors", ".pt", ".msgpack"):
        try:
            parity.transfer({{"a": torch.ones(50_000)}} if end != ".msgpack" else tree(), {str(tmp_path)!r} + "/a" + end)
        except parity.InputError as error:
            print(str(error).partition("could not be written: ")[2])
    """.replace("tree()", "parity.weights.checkpoint.Source(Path(sys.argv[1]))").replace(
        "import resource", "from pathlib import Path; import resource"
    )
    safe = tmp_path / "safe"
    safe.mkdir()
    parity.transfer(Holder(bias=torch.ones(50_000)), safe / "s.msgpack")
    done = run(code, str(safe / "s.msgpack"))
    reasons = done.stdout.splitlines()
    assert all(reason.endswith("; it is as it was before") for reason in reasons)
    assert reasons[0] == reasons[2] == "File too large; it is as it was before"
    assert len(reasons) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["safe"]


def run(code, *argv):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *argv],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


KILLED = """
import sys, time, torch, parity
from parity.weights import transfer
original, asked = transfer.travelled, []
def slow(*args):
    asked.append(args)
    if len(asked) == 3:
        print("half", flush=True)
        time.sleep(60)
    return original(*args)
transfer.travelled = slow
parity.transfer({f"p{i}": torch.full((100, 100), 2.0) for i in range(5)}, sys.argv[1], overwrite=True)
"""


@pytest.mark.parametrize("end", [".safetensors", ".pt", ""], ids=lambda end: end or "folder")
def test_a_killed_process_leaves_the_old_file(end, tmp_path):
    path = tmp_path / f"a{end}"
    old = {f"p{i}": torch.full((100, 100), 1.0) for i in range(5)}
    parity.transfer(old, path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "half\n"
        process.kill()
    back = parity.transfer(path, {k: torch.zeros_like(v) for k, v in old.items()}).value
    assert snapshot(back) == snapshot(old)


def test_a_file_is_whole_on_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: calls.append("sync"))
    original = os.replace
    monkeypatch.setattr(files.os, "replace", lambda *paths: (calls.append("replace"), original(*paths)))
    parity.transfer(TorchPair(), tmp_path / "a.safetensors")
    assert calls == ["sync", "replace", "sync"]


# ---------------------------------------------------------------- verify


@pytest.mark.parametrize("end", [".safetensors", ".pt", ".msgpack", ""], ids=lambda end: end or "folder")
def test_verify_finds_one_wrong_bit_and_keeps_the_old_file(end, tmp_path, monkeypatch):
    path, source = written(end, tmp_path)
    before = listing(tmp_path)
    original = files.sync
    chosen = checkpoint.located(path, source=False)[0]

    def write(temporary, *rest):
        made = chosen.write(temporary, *rest)
        file = made[0] if made else temporary
        content = bytearray(file.read_bytes())
        # The pattern of one value, at its place in the file.
        place = content.index(source.norm.bias.detach().numpy().tobytes())
        content[place] ^= 1
        file.write_bytes(content)
        return made

    broken = checkpoint.dataclasses.replace(chosen, write=write)
    monkeypatch.setattr(
        checkpoint, "located", lambda path, source: (broken, path if end else path / f"model{checkpoint.INDEX}")
    )
    with pytest.raises(
        TransferError, match=r"was read back and is not what was written, at norm\.bias; it is as it was before"
    ):
        parity.transfer(source, path, overwrite=True, verify=True)
    assert listing(tmp_path) == before
    assert files.sync is original
    parity.transfer(source, path, overwrite=True)
    assert listing(tmp_path) != before


@pytest.mark.parametrize("make", [FlaxPair, lambda: nnx.state(FlaxPair()), TorchPair, lambda: TorchPair().state_dict()])
def test_verify_reads_a_model_back_too(make, monkeypatch):
    source = scramble(TorchPair(), "verify")
    assert parity.transfer(source, make(), verify=True).verified
    from parity.frameworks import load

    room = load("nnx" if make is FlaxPair or make().__class__ is nnx.State else "torch")
    original = room.fill

    def fill(value, arrays):
        return original(
            value, {path: array + np.float32(1) if path.startswith("dense.b") else array for path, array in arrays.items()}
        )

    monkeypatch.setattr(room, "fill", fill)
    with pytest.raises(TransferError, match=r"the target was read back and is not what was sent, at dense\.bias"):
        parity.transfer(source, make(), verify=True)


# ---------------------------------------------------------------- memory

MEASURE = """
import sys, threading, time, pathlib
import numpy as np, torch, parity
from flax import nnx
import jax, jax.numpy as jnp
torch.set_num_threads(1)
source, target = sys.argv[1:3]
MIB = 2**20
class Big(nnx.Module):
    def __init__(self):
        for i in range(12):
            setattr(self, f"p{i}", nnx.Linear(2048, 1024, use_bias=False, rngs=nnx.Rngs(0)))
if target == "nnx":
    target = nnx.eval_shape(Big)
    parity.transfer({"weight": torch.ones(2, 2)}, nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0)))
def resident():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile"))) / 1024
before, peak, stop = resident(), 0.0, False
def watch():
    global peak
    while not stop:
        peak = max(peak, resident())
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
thread.start()
done = parity.transfer(source, target)
stop = True
thread.join()
print(peak - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """96 MiB in twelve arrays of 8 MiB, 2048 x 1024 transposed on the way to Flax."""
    folder = tmp_path_factory.mktemp("large")
    for end in (".safetensors", ".pt"):
        parity.transfer({f"p{i}.weight": torch.full((1024, 2048), float(i)) for i in range(12)}, folder / f"a{end}")
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is read from /proc")
@pytest.mark.parametrize("source", ["a.safetensors", "a.pt"])
@pytest.mark.parametrize("kind", ["b.safetensors", "b.pt", "nnx"])
def test_memory_is_the_output_and_little_more(source, kind, large, tmp_path):
    extra = float(run(MEASURE, str(large / source), kind if kind == "nnx" else str(tmp_path / kind)).stdout)
    output = 96 if kind == "nnx" else 0
    # Two of the largest arrays, and what a process takes at its first call of jax.
    room = 2 * 8 + 8
    assert output <= extra + 8
    assert extra < output + room
