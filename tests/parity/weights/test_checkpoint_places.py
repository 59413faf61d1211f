"""Where checkpoints lie and what else lies there: links, long and foreign names, files of others, errors at the last step."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_helpers import FlaxPair, TorchPair, listing
from transfer_helpers import scramble, snapshot

import parity
from parity import InputError, TransferError
from parity.weights import files, shards

ENDS = [".safetensors", ".pt", ".msgpack", ".orbax", ""]
everywhere = pytest.mark.parametrize("end", ENDS, ids=lambda end: end or "folder")


def old_and_new(end, folder):
    parity.transfer(scramble(TorchPair(), "old"), folder / f"a{end}")
    return folder / f"a{end}", scramble(TorchPair(), "new")


def holds(path, source):
    """Whether a checkpoint has the parameters of a model, seen from Flax."""
    expected = snapshot(parity.transfer(source, FlaxPair()).value)
    return snapshot(parity.transfer(path, FlaxPair()).value) == expected


# ---------------------------------------------------------------- the last step


@everywhere
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EXDEV], ids=errno.errorcode.get)
def test_an_error_at_the_rename_leaves_the_old_checkpoint_and_nothing_else(end, number, tmp_path, monkeypatch):
    path, source = old_and_new(end, tmp_path)
    before = listing(tmp_path)

    def broken(*_):
        raise OSError(number, os.strerror(number))

    for name in ("replace", "rename"):
        monkeypatch.setattr(files.os, name, broken)
    monkeypatch.setattr(files, "exchange", broken)
    with pytest.raises(InputError, match=rf"could not be written: {os.strerror(number)}; it is as it was before"):
        parity.transfer(source, path, overwrite=True)
    monkeypatch.undo()
    assert listing(tmp_path) == before
    assert holds(path, scramble(TorchPair(), "old"))


def test_folders_change_places_in_one_step(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    if sys.platform == "linux":
        files.exchange(tmp_path / "a", tmp_path / "b")
        assert listing(tmp_path) == {"a/b": b"b", "b/a": b"a"}
    with pytest.raises(OSError, match="No such file or directory"):
        files.exchange(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("works", [True, False])
def test_a_folder_is_replaced_where_folders_cannot_change_places(works, tmp_path, monkeypatch):
    path, source = old_and_new(".orbax", tmp_path)
    before, original, asked = listing(tmp_path), os.rename, []

    def exchange(*_):
        raise OSError(errno.EINVAL, "no such call")

    def rename(one, other):
        # The temporary folder of Orbax itself is none of ours.
        if Path(other) == path:
            asked.append(one)
            if not works and len(asked) == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(one, other)

    monkeypatch.setattr(files, "exchange", exchange)
    monkeypatch.setattr(files.os, "rename", rename)
    if works:
        parity.transfer(source, path, overwrite=True)
    else:
        with pytest.raises(InputError, match="Input/output error; it is as it was before"):
            parity.transfer(source, path, overwrite=True)
    monkeypatch.undo()
    assert (listing(tmp_path) == before) is not works
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert holds(path, source if works else scramble(TorchPair(), "old"))


@pytest.mark.parametrize("end", ENDS[:4])
def test_what_another_process_put_there_meanwhile_stays(end, tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir()
    made, source = old_and_new(end, tmp_path / "theirs")
    path, original = tmp_path / f"a{end}", parity.weights.transfer.travelled

    def slow(*args):
        if not path.exists():
            (shutil.copytree if made.is_dir() else shutil.copy)(made, path)
        return original(*args)

    monkeypatch.setattr("parity.weights.transfer.travelled", slow)
    with pytest.raises(TransferError, match=r"a.* exists; pass overwrite=True"):
        parity.transfer(source, path)
    monkeypatch.undo()
    assert holds(path, scramble(TorchPair(), "old"))
    assert {p.name for p in tmp_path.iterdir()} == {"theirs", path.name}


def test_a_folder_that_was_made_on_the_way_goes_again_unless_it_is_used(tmp_path, monkeypatch):
    for name, used in (("a", False), ("b", True)):

        def broken(*_, folder=tmp_path / name, used=used):
            if used:
                (folder / "notes.txt").write_text("somebody's")
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("parity.weights.transfer.travelled", broken)
            with pytest.raises(KeyboardInterrupt):
                parity.transfer(TorchPair(), tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
    assert listing(tmp_path) == {"b/notes.txt": b"somebody's"}


def test_a_folder_that_cannot_be_written_into_leaves_nothing(tmp_path):
    code = """
import os, sys, torch, parity, parity.frameworks.torch
os.chdir(sys.argv[1])
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
for path in ("a.pt", "b.safetensors", "c", "."):
    try:
        parity.transfer({"w": torch.ones(2)}, path)
    except parity.InputError as error:
        print(error)
"""
    locked = tmp_path / "locked"
    locked.mkdir()
    for folder in (locked, tmp_path, *tmp_path.parents[:-2]):
        if folder.stat().st_uid == os.getuid() and folder != Path("/tmp"):
            folder.chmod(0o555 if folder == locked else 0o755)
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", code, str(locked)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        check=False,
    )
    locked.chmod(0o755)
    if "Permission" in done.stderr:
        pytest.skip("the interpreter itself may not be read by an ordinary user here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot be written into; give another one") == 4
    assert not list(locked.iterdir())


# ---------------------------------------------------------------- links and names


@pytest.mark.parametrize("kind", ["link", "dangling"])
def test_a_link_is_not_replaced(kind, tmp_path):
    path, source = old_and_new(".pt", tmp_path)
    (tmp_path / "link.pt").symlink_to(path if kind == "link" else tmp_path / "nowhere.pt")
    with pytest.raises(InputError, match=r"link\.pt is a link to .*; give the path of the file itself, or another name"):
        parity.transfer(source, tmp_path / "link.pt", overwrite=True)
    assert (tmp_path / "link.pt").is_symlink()
    assert holds(path, scramble(TorchPair(), "old"))


def test_another_name_of_the_old_file_keeps_the_old_content(tmp_path):
    path, source = old_and_new(".pt", tmp_path)
    os.link(path, tmp_path / "other.pt")
    parity.transfer(source, path, overwrite=True)
    assert holds(path, source)
    assert holds(tmp_path / "other.pt", scramble(TorchPair(), "old"))


@everywhere
def test_source_and_target_may_be_one_under_two_names(end, tmp_path, monkeypatch):
    path, _ = old_and_new(end, tmp_path)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    like = {"like": FlaxPair()} if end in (".msgpack", ".orbax") else {}
    parity.transfer(path, Path("..") / path.name, overwrite=True, verify=True, **like)
    assert holds(path, scramble(TorchPair(), "old"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, "sub"]


def test_a_shard_of_the_target_may_be_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD", 40)
    state = {"a": torch.arange(10.0), "b": torch.arange(10.0) + 5}
    parity.transfer(state, tmp_path / "model")
    shard = tmp_path / "model" / "model-00002-of-00002.safetensors"
    parity.transfer(shard, tmp_path / "model", overwrite=True, verify=True)
    assert snapshot(parity.transfer(tmp_path / "model", {"b": torch.zeros(10)}).value) == snapshot({"b": state["b"]})
    assert len(listing(tmp_path)) == 2


@pytest.mark.parametrize(
    "name", ["gewichte-ä.pt", "重み.safetensors", "two words.msgpack", "ü" * 126 + ".pt", "x" * 243 + ".safetensors"]
)
def test_foreign_and_long_names_are_taken(name, tmp_path):
    source = scramble(TorchPair(), "names")
    parity.transfer(source, tmp_path / name, verify=True)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert holds(tmp_path / name, source)


@pytest.mark.parametrize(
    ("name", "words"), [("a" * 300 + ".pt", "File name too long"), ("a\0b.pt", "embedded null"), ("a\0b", "embedded null")]
)
def test_names_that_no_file_can_have_are_refused(name, words, tmp_path):
    for call in ((tmp_path / name, TorchPair()), (TorchPair(), tmp_path / name)):
        with pytest.raises(InputError, match=rf"cannot be used: {words}.*; check the path"):
            parity.transfer(*call)


def test_an_index_whose_name_is_too_long_for_shards_has_others(tmp_path):
    name = "a" * 232 + ".safetensors.index.json"
    source = scramble(TorchPair(), "long")
    parity.transfer(source, tmp_path / name, verify=True)
    assert set(listing(tmp_path)) == {name, "model-00001-of-00001.safetensors"}
    assert holds(tmp_path / name, source)


# ---------------------------------------------------------------- other people's files


def test_a_folder_with_another_checkpoint_does_not_become_two(tmp_path):
    parity.transfer(TorchPair(), tmp_path / "model.safetensors")
    before = listing(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(InputError, match=r"holds model\.safetensors already, a checkpoint of another name; give another"):
            parity.transfer(TorchPair(), tmp_path, overwrite=overwrite)
    assert listing(tmp_path) == before


def test_shards_of_a_killed_run_are_no_obstacle(tmp_path):
    safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "model-00001-of-00003.safetensors")
    source = scramble(TorchPair(), "killed")
    parity.transfer(source, tmp_path)
    assert holds(tmp_path, source)
    assert (tmp_path / "model-00001-of-00003.safetensors").exists()


def test_what_lies_in_a_folder_of_orbax_is_not_lost(tmp_path):
    path, source = old_and_new(".orbax", tmp_path)
    parity.transfer(source, path / "inside.safetensors")
    before = listing(tmp_path)
    for given in (source, path / "inside.safetensors"):
        with pytest.raises(InputError, match=r"holds inside\.safetensors, which is not Orbax's, and is not replaced"):
            parity.transfer(given, path, overwrite=True, like=FlaxPair())
    assert listing(tmp_path) == before
