"""What is refused of files, in which words, and that nothing has been written then."""

import contextlib
import json
import os
import pickle
import shutil
import struct
import sys
import zipfile

import flax.serialization
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoint_helpers import FlaxPair, TorchPair, listing, parts, whole
from flax import nnx
from torch import nn
from transfer_helpers import FlaxHolder, scramble, snapshot

import parity
from parity import InputError
from parity.weights import checkpoint


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


GOOD = whole({"w": entry()}, b"\0" * 8)

# The content of a .safetensors file, and what must stand in the error.
SAFETENSORS = {
    "empty": (b"", "is empty (0 bytes)"),
    "short": (b"abc", "its header would be 0 bytes long, the file has 3"),
    "cut-header": (GOOD[:20], "its header would be"),
    "cut-data": (GOOD[:-1], "w ends at byte 8, but the file has only 7 bytes of data: it is cut short"),
    "long-header": (struct.pack("<Q", 10**9) + b"{}" * 50, "its header would be 1,000,000,000 bytes long, the file has 108"),
    "no-json": (whole(b"{not json"), "its header is no valid JSON"),
    "no-text": (whole(b"\xff\xfe{}"), "its header is no valid JSON"),
    "deep": (whole(b"[" * 200_000), "its header is no valid JSON"),
    "list": (whole([1, 2]), "its header is a list, not an object"),
    "twice": (whole(b'{"w":' + json.dumps(entry()).encode() + b',"w":1}', b"\0" * 8), "key 'w' stands there twice"),
    "keys": (whole({"w": {"dtype": "F32"}}), "w is described by {'dtype': 'F32'}, not by dtype, shape and data_offsets"),
    "dtype": (whole({"w": entry(dtype="F4")}, b"\0" * 8), "w has dtype 'F4', and only F64"),
    "negative": (whole({"w": entry((-2,), (0, -8))}), "which are no sizes"),
    "true": (whole({"w": entry((True,), (0, 4))}, b"\0" * 4), "which are no sizes"),
    "text": (whole({"w": entry(("2",))}, b"\0" * 8), "which are no sizes"),
    "huge": (whole({"w": entry((2**40, 2**40))}, b"\0" * 8), "by its shape and dtype, but 8 by its data_offsets"),
    "bytes": (whole({"w": entry((3,))}, b"\0" * 8), "w takes 12 bytes by its shape and dtype, but 8 by its data_offsets"),
    "overlap": (whole({"a": entry(), "b": entry((2,), (4, 12))}, b"\0" * 12), "b overlaps a: it begins at byte 4 of the data"),
    "gap": (whole({"a": entry(), "b": entry((2,), (12, 20))}, b"\0" * 20), "b leaves a gap after a"),
    "beyond": (whole({"a": entry(), "b": entry((2,), (8, 16))}, b"\0" * 8), "b ends at byte 16, but the file has only 8"),
    "rest": (whole({"a": entry()}, b"\0" * 11), "3 bytes at the end belong to no tensor"),
    "metadata": (whole({"__metadata__": {"a": 1}}), "its __metadata__ is no mapping from text to text"),
    "zip": (b"PK\x03\x04" + b"\0" * 60, "it is a zip archive, as torch.save writes: name it .pt"),
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid",
        "it is a git-lfs pointer in place of the file: run git lfs pull",
    ),
    "html": (b"<!DOCTYPE html><html>not found</html>", "it is a web page or XML"),
    "html-behind-space": (b"\xef\xbb\xbf\r\n  <html>not found</html>", "it is a web page or XML"),
    "answer": (b'{"error": "Repository not found"}', "it is JSON, perhaps an index or what a server answered"),
    "gzip": (b"\x1f\x8b\x08" + b"\0" * 60, "it is compressed: unpack it first"),
    "gguf": (b"GGUF" + b"\3\0\0\0" * 20, "it is a GGUF file"),
    "numpy": (b"\x93NUMPY\x01\0" + b"v" * 60, "it is a single array of NumPy's"),
    "pickle": (b"\x80\x04\x95" + b"\0" * 60, "it is a pickle, and loading that would run code"),
    "no-elements": (
        whole({"w": entry((0, 2**62), (0, 0))}),
        "w has shape (0, 4611686018427387904), which no computer can hold",
    ),
    "axes": (whole({"w": entry((1,) * 65, (0, 4))}, b"\0" * 4), "w has 65 axes, and 64 are the most"),
    "surrogate": (
        whole(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", b"\0" * 8),
        r"'\ud800' is no valid text (a lone surrogate)",
    ),
    "number": (whole(b'{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}', b"\0" * 8), "which are no sizes"),
    "digits": (whole(b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b"]}}"), "its header is no valid JSON"),
}


def refused(path, *words, target=None, **options):
    """Refused into a model and into a file, with those words, and neither is touched."""
    model = scramble(FlaxPair(), "refused") if target is None else target
    before, files = snapshot(model), listing(path.parent)
    for where in (model, path.parent / "out.safetensors"):
        with pytest.raises(InputError) as error:
            parity.transfer(path, where, **options)
        for word in words:
            assert word in str(error.value), str(error.value)
    assert snapshot(model) == before
    assert listing(path.parent) == files


@pytest.mark.parametrize("name", SAFETENSORS)
def test_a_damaged_safetensors_file_is_refused(name, tmp_path):
    content, words = SAFETENSORS[name]
    (tmp_path / "a.safetensors").write_bytes(content)
    refused(tmp_path / "a.safetensors", "a.safetensors", words)


def test_the_undamaged_file_is_taken(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(GOOD)
    assert parity.transfer(tmp_path / "a.safetensors", {"w": torch.ones(2)}).value["w"].tolist() == [0, 0]


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_no_cut_of_a_file_is_taken(cut, tmp_path):
    safetensors.torch.save_file({"dense.weight": torch.ones(4, 4), "b": torch.ones(3)}, tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(content[: cut % len(content)])
    refused(tmp_path / "a.safetensors", "a.safetensors")


# ---------------------------------------------------------------- shards


def sharded(folder):
    files = {"one.safetensors": {"dense.weight": torch.ones(4, 4)}, "two.safetensors": {"dense.bias": torch.ones(4)}}
    names = {}
    for file, state in files.items():
        safetensors.torch.save_file(state, folder / file)
        names |= dict.fromkeys(state, file)
    return names


def write_index(folder, names):
    (folder / "model.safetensors.index.json").write_text(names if isinstance(names, str) else json.dumps({"weight_map": names}))
    return folder / "model.safetensors.index.json"


INDEXES = {
    "missing": ({"x": "three.safetensors"}, "names three.safetensors, and", "has no such files; fetch them too"),
    "parent": ({"x": "../one.safetensors"}, "names ../one.safetensors, outside its folder"),
    "absolute": ({"x": "/etc/passwd"}, "names /etc/passwd, outside its folder"),
    "deeper": ({"x": "sub/../../one.safetensors"}, "outside its folder"),
    "backslash": ({"x": "..\\one.safetensors"}, "outside its folder"),
    "dots": ({"x": ".."}, "outside its folder"),
    "absent": ({"x": "one.safetensors"}, "x is not in one.safetensors, where the index has it"),
    "moved": (
        {"dense.bias": "one.safetensors", "dense.weight": "two.safetensors"},
        "dense.bias is in two.safetensors, but the index has it in one.safetensors",
    ),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_lies_is_refused(name, tmp_path):
    (tmp_path / "one.safetensors").write_bytes(b"never opened")
    folder = tmp_path / "model"
    folder.mkdir()
    names = sharded(folder)
    wrong, *words = INDEXES[name]
    refused(write_index(folder, names | wrong), *words)
    refused(folder / "model.safetensors.index.json", *words)


def test_a_tensor_that_the_index_leaves_out_is_refused(tmp_path):
    names = sharded(tmp_path)
    safetensors.torch.save_file({"dense.weight": torch.ones(4, 4), "more": torch.ones(1)}, tmp_path / "one.safetensors")
    refused(write_index(tmp_path, names), "more is in one.safetensors, but the index has it in no file")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("{", "is no index file: it is no valid JSON"),
        ("[]", "it has no weight_map"),
        ('{"weight_map": {}}', "it has no weight_map"),
        ('{"weight_map": {"a": 3}}', "it has no weight_map"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "key 'a' stands there twice"),
        ("version https://git-lfs.github.com/spec/v1\noid", "it is a git-lfs pointer in place of the file: run git lfs pull"),
        ("<html>", "it is a web page or XML"),
        ("[" * 100_000, "is no index file: it is no valid JSON"),
    ],
)
def test_a_damaged_index_is_refused(text, words, tmp_path):
    refused(write_index(tmp_path, text), "model.safetensors.index.json", words)


def test_a_link_to_a_shard_is_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model").mkdir()
    names = sharded(tmp_path / "blobs")
    for file in set(names.values()):
        (tmp_path / "model" / file).symlink_to(tmp_path / "blobs" / file)
    write_index(tmp_path / "model", names)
    parity.transfer(tmp_path / "model", nn.ModuleDict({"dense": nn.Linear(4, 4)}))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds nothing; a folder must hold one"):
        parity.transfer(tmp_path, FlaxPair())
    sharded(tmp_path)
    with pytest.raises(InputError, match=r"holds one.safetensors, two.safetensors; a folder must hold one"):
        parity.transfer(tmp_path, FlaxPair())


# ---------------------------------------------------------------- torch.save


class Code:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_code_in_a_file_is_not_run(form, tmp_path):
    path, trace = tmp_path / "a.pt", tmp_path / "ran"
    value = {"w": torch.ones(2), "x": Code(trace)}
    if form == "pickle":
        path.write_bytes(pickle.dumps({"x": Code(trace)}, protocol=2))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=form == "zip")
    refused(path, "a.pt")
    with pytest.raises(InputError) as error:
        parity.transfer(path, FlaxPair())
    assert "posix.mkdir" in str(error.value) or "mkdir" in str(error.value)
    assert "loading that would run code; nothing of it was run. Ask its author for safetensors" in str(error.value)
    assert not trace.exists()


def test_a_whole_pickled_module_is_refused(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "torch.nn.modules.linear.Linear", "would run code", "save model.state_dict()")


TORCH = {
    "tensor": (lambda: torch.ones(2), "holds a Tensor, not a state_dict; save model.state_dict()"),
    "list": (lambda: [torch.ones(2)], "holds a list, not a state_dict"),
    "numbers": (lambda: {"epoch": 3}, "holds no tensors: epoch"),
    "none": (lambda: {}, "holds no tensors: nothing"),
    "several": (
        lambda: {"model": {"w": torch.ones(1)}, "state_dict": {"w": torch.ones(1)}},
        "holds tensors under state_dict, model; say which are meant with key, such as key='state_dict' (--key)",
    ),
    "unknown": (
        lambda: {"generator": {"w": torch.ones(1)}},
        "holds tensors under generator; say which are meant with key, such as key='generator' (--key)",
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_a_file_without_one_state_dict_is_refused(name, tmp_path):
    make, words = TORCH[name]
    torch.save(make(), tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "a.pt", words)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello world", b"PK\x03\x04 cut", GOOD, b"<html>", b"version https://git-lfs.github.com/spec/v1\noid"],
    ids=["empty", "text", "zip", "st", "web", "lfs"],
)
def test_what_torch_did_not_write_is_refused(content, tmp_path):
    (tmp_path / "a.pt").write_bytes(content)
    refused(tmp_path / "a.pt", "a.pt", "is empty" if not content else "is no file of torch.save, or is damaged")
    known = {b"v": "it is a git-lfs pointer in place of the file: run git lfs pull", b"<": "it is a web page or XML"}
    if content[:1] in known:
        refused(tmp_path / "a.pt", known[content[:1]])


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9, 0.99])
def test_a_cut_file_of_torch_is_refused(keep, tmp_path):
    torch.save({"w": torch.ones(500)}, tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(content[: int(keep * len(content))])
    refused(tmp_path / "a.pt", "is no file of torch.save, or is damaged")


def test_a_sparse_tensor_in_a_file_is_refused(tmp_path):
    torch.save({"w": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    for target in ({"w": torch.zeros(3, 3)}, tmp_path / "b.safetensors"):
        with pytest.raises(InputError, match="w is not dense"):
            parity.transfer(tmp_path / "a.pt", target)
    assert len(list(tmp_path.iterdir())) == 1


def packed_anew(path, change, compression=zipfile.ZIP_STORED):
    """An archive of torch's with each entry changed, or left out where nothing comes back."""
    with zipfile.ZipFile(path) as archive:
        found = [(info.filename, change(info.filename, archive.read(info))) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in found:
            if content is not None:
                archive.writestr(name, content)


ARCHIVES = {
    "short": (
        lambda name, data: data[:200] if name.endswith("data/0") else data,
        "a takes 400 bytes, and 200 are stored for it",
    ),
    "long": (lambda name, data: data + b"\0" * 8 if name.endswith("data/0") else data, "a takes 400 bytes, and 408 are stored"),
    "gone": (lambda name, data: None if name.endswith("data/0") else data, "is no file of torch.save, or is damaged"),
    "no-pickle": (lambda name, data: None if name.endswith("data.pkl") else data, "is no file of torch.save, or is damaged"),
    "pickle": (lambda name, data: data[:-20] if name.endswith("data.pkl") else data, "is no file of torch.save, or is damaged"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_of_torch_with_a_damaged_entry_is_refused(name, tmp_path):
    change, words = ARCHIVES[name]
    torch.save({"a": torch.ones(100), "b": torch.ones(1000)}, tmp_path / "a.pt")
    packed_anew(tmp_path / "a.pt", lambda _, data: data)
    target = {"a": torch.zeros(100), "b": torch.zeros(1000)}
    assert parity.transfer(tmp_path / "a.pt", target).value["a"].tolist() == [1] * 100
    packed_anew(tmp_path / "a.pt", change)
    refused(tmp_path / "a.pt", words, target=target)


def test_an_archive_from_a_machine_of_the_other_byte_order_is_turned_round(tmp_path, monkeypatch):
    monkeypatch.setattr("parity.frameworks.torch.files.MAPPED", 1)
    state = {name: torch.arange(5000.0) + place for place, name in enumerate("abc")}
    torch.save(state, tmp_path / "a.pt")
    other = {"little": b"big", "big": b"little"}[sys.byteorder]

    def turned(name, data):
        if name.endswith("byteorder"):
            return other
        return np.frombuffer(data, np.float32).byteswap().tobytes() if "/data/" in name else data

    packed_anew(tmp_path / "a.pt", turned)
    # With a cast each array is read twice.
    done = parity.transfer(tmp_path / "a.pt", tmp_path / "b.pt", cast="float64", verify=True)
    assert {e.target_dtype for e in done.plan} == {"float64"}
    assert snapshot(torch.load(tmp_path / "b.pt")) == snapshot({name: tensor.double() for name, tensor in state.items()})


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path):
    torch.save({"a": torch.ones(100), "b": torch.ones(1000)}, tmp_path / "a.pt")
    packed_anew(tmp_path / "a.pt", lambda _, data: data, zipfile.ZIP_DEFLATED)
    refused(tmp_path / "a.pt", "holds compressed entries, such as a/data.pkl, which torch.save never writes; unpack it")


def test_no_damaged_byte_of_an_archive_is_an_error_of_another_kind(tmp_path):
    torch.save({"a": torch.ones(3), "b": torch.ones(4)}, tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    for place in range(0, len(content), 41):
        damaged = bytearray(content)
        damaged[place] ^= 0xFF
        (tmp_path / "a.pt").write_bytes(damaged)
        # Of the arrays' own bytes nothing tells whether they are right.
        with contextlib.suppress(InputError):
            parity.transfer(tmp_path / "a.pt", {"a": torch.zeros(3), "b": torch.zeros(4)})


def test_a_name_that_is_no_text_is_not_written(tmp_path):
    for end in (".safetensors", ".pt", ""):
        with pytest.raises(InputError, match=r"'\\ud800' is no valid text \(a lone surrogate\), and cannot stand in a file"):
            parity.transfer({"\ud800": torch.ones(1)}, tmp_path / f"a{end}")
    assert not list(tmp_path.iterdir())


def test_a_zip_that_is_no_checkpoint_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(tmp_path / "a.pt", "is no file of torch.save, or is damaged")


# ---------------------------------------------------------------- msgpack, Orbax


def array(shape=(2,), dtype="float32", data=b"\0" * 8):
    return msgpack.ExtType(1, msgpack.packb((shape, dtype, data)))


MSGPACK = {
    "empty": (b"", "is empty"),
    "cut": (msgpack.packb({"w": array()})[:-3], "it is cut short"),
    "rest": (msgpack.packb({"w": array()}) + b"\x01", "1 bytes follow after its end"),
    "number": (msgpack.packb(3), "it holds no tree of arrays"),
    "never": (b"\xc1", "byte 0 is 0xc1, with which nothing begins"),
    "entries": (b"\xdf\xff\xff\xff\xff\xa1w\x01", "it is cut short"),
    "bytes": (b"\xc6\xff\xff\xff\xff", "it is cut short: 4,294,967,295 bytes are announced"),
    "twice": (b"\x82\xa1w\x01\xa1w\x02", "key 'w' stands there twice"),
    "deep": (b"\x81\xa1a" * 100 + b"\x01", "it is nested more than 64 deep"),
    "key": (b"\x81\xc0\x01", "is neither text nor a number"),
    "utf": (b"\x81\xa1\xff\x01", "is not UTF-8"),
    "object": (msgpack.packb({"w": array(dtype="O")}), "has dtype 'O', and only float64"),
    "shape": (msgpack.packb({"w": array((3,))}), "takes 12 bytes by its shape, but has 8"),
    "negative": (msgpack.packb({"w": array((-2,))}), "has no shape or no values"),
    "overflow": (msgpack.packb({"w": array((2**62, 4))}), "takes 73,786,976,294,838,206,464 bytes by its shape"),
    "inner": (msgpack.packb({"w": msgpack.ExtType(1, b"\x93")}), "it is cut short"),
    "two": (msgpack.packb({"a": {"b": array()}, "a.b": array()}), "two arrays are called a.b"),
    "no-elements": (msgpack.packb({"w": array((0, 2**62), data=b"")}), "which no computer can hold"),
    "axes": (msgpack.packb({"w": array((1,) * 65, data=b"\0" * 4)}), "has 65 axes, and 64 are the most"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid", "it is a git-lfs pointer"),
    "pieces": (
        msgpack.packb({"w": {"__msgpack_chunked_array__": True, "shape": {"0": 5}, "chunks": {"0": array()}}}),
        "the pieces of an array do not add up to its shape (5,)",
    ),
    "unlike": (
        msgpack.packb({"w": {"__msgpack_chunked_array__": True, "shape": {"0": 2}, "chunks": {"0": 3}}}),
        "its pieces are not alike",
    ),
    "web": (b"<html><head>", "it is a web page or XML"),
}


@pytest.mark.parametrize("name", MSGPACK)
def test_a_damaged_msgpack_file_is_refused(name, tmp_path):
    content, words = MSGPACK[name]
    (tmp_path / "a.msgpack").write_bytes(content)
    refused(tmp_path / "a.msgpack", "a.msgpack", words)


def test_no_cut_of_a_msgpack_file_is_taken(tmp_path):
    content = flax.serialization.to_bytes({"dense": {"kernel": np.ones((4, 4)), "bias": np.ones(4)}})
    for cut in range(0, len(content), 5):
        (tmp_path / "a.msgpack").write_bytes(content[:cut])
        with pytest.raises(InputError, match=r"a\.msgpack"):
            parity.transfer(tmp_path / "a.msgpack", FlaxPair())


def test_damaged_orbax_folders_are_refused(tmp_path):
    parity.transfer(FlaxPair(), tmp_path / "a.orbax")
    (tmp_path / "a.orbax" / "_METADATA").write_text("{")
    refused(tmp_path / "a.orbax", "is no Orbax checkpoint, or is damaged")
    (tmp_path / "b.orbax").mkdir()
    refused(tmp_path / "b.orbax", "is no Orbax checkpoint, or is damaged")


def test_an_array_of_an_orbax_folder_that_is_lost_meanwhile_is_named(tmp_path):
    parity.transfer(FlaxPair(), tmp_path / "a.orbax")
    opened = checkpoint.Source(tmp_path / "a.orbax")
    shutil.rmtree(tmp_path / "a.orbax")
    for leaf in opened.leaves(None):
        with pytest.raises(InputError, match=rf"{leaf.path} of .*a\.orbax cannot be read"):
            leaf.read()


# ---------------------------------------------------------------- places


def test_what_does_not_exist_or_says_no_kind_is_refused(tmp_path):
    for name, words in {"no.pt": "cannot be read: No such file", "no": "does not exist", "no.xyz": "does not exist"}.items():
        with pytest.raises(InputError, match=words):
            parity.transfer(tmp_path / name, FlaxPair())
    (tmp_path / "a.xyz").write_text("x")
    for call in ((tmp_path / "a.xyz", FlaxPair()), (FlaxPair(), tmp_path / "b.xyz")):
        with pytest.raises(InputError, match=r"says no kind of checkpoint by its end; known are \.safetensors"):
            parity.transfer(*call)


@pytest.mark.parametrize("end", [".safetensors", ".pt", ".msgpack", ".orbax", ""])
def test_an_existing_target_stays_unless_asked(end, tmp_path):
    path = tmp_path / f"a{end}"
    parity.transfer(FlaxPair() if end in (".msgpack", ".orbax") else TorchPair(), path)
    before = listing(tmp_path)
    with pytest.raises(InputError, match=r"exists; pass overwrite=True \(--overwrite\) to replace it"):
        parity.transfer(scramble(TorchPair(), "new"), path)
    assert listing(tmp_path) == before
    parity.transfer(scramble(TorchPair(), "new"), path, overwrite=True)
    assert listing(tmp_path) != before
    assert snapshot(parity.transfer(path, FlaxPair()).value) == snapshot(
        parity.transfer(scramble(TorchPair(), "new"), FlaxPair()).value
    )


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "a.orbax").mkdir()
    (tmp_path / "a.orbax" / "thesis.txt").write_text("years of work")
    (tmp_path / "a.pt").mkdir()
    for name in ("a.orbax", "a.pt"):
        with pytest.raises(InputError, match="is a folder that holds no such checkpoint, and is not replaced"):
            parity.transfer(FlaxPair(), tmp_path / name, overwrite=True)
    assert (tmp_path / "a.orbax" / "thesis.txt").exists()
    (tmp_path / "b.orbax").write_text("")
    with pytest.raises(InputError, match="is a file, and an Orbax checkpoint is a folder"):
        parity.transfer(FlaxPair(), tmp_path / "b.orbax", overwrite=True)


def test_a_missing_or_forbidden_folder_is_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"there is no folder .*nowhere; make it first"):
        parity.transfer(TorchPair(), tmp_path / "nowhere" / "a.pt")
    with pytest.raises(InputError, match=r"there is no folder .*nowhere; make it first"):
        parity.transfer(TorchPair(), tmp_path / "nowhere" / "model")
    # Root, as which tests may run, is refused nothing by the file system.
    monkeypatch.setattr(checkpoint.os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match="cannot be written into; give another one"):
        parity.transfer(TorchPair(), tmp_path / "a.pt")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- names and dtypes


def test_torch_names_alone_do_not_become_flax_names(tmp_path):
    parity.transfer(TorchPair(), tmp_path / "a.pt")
    with pytest.raises(InputError) as error:
        parity.transfer(tmp_path / "a.pt", tmp_path / "b.msgpack")
    assert "give the names of the target with like (--like)" in str(error.value)
    assert "dense.weight (4, 4): its name alone does not tell what Flax calls it, or in which layout" in str(error.value)
    assert "bias" not in str(error.value)


@pytest.mark.parametrize("array", [jnp.ones((3, 3, 2)), jnp.ones((3, 3, 2, 2))], ids=["heads", "filter"])
def test_flax_names_that_are_not_certain_are_refused(array, tmp_path):
    parity.transfer(nnx.Dict(a=FlaxHolder(kernel=array)), tmp_path / "a.msgpack")
    with pytest.raises(InputError, match=r"a\.kernel .* its name alone does not tell what PyTorch calls it"):
        parity.transfer(tmp_path / "a.msgpack", tmp_path / "b.pt")


def test_a_kernel_of_many_axes_is_not_guessed_by_name(tmp_path):
    torch.save({"a.weight": torch.ones(3, 3, 3)}, tmp_path / "a.pt")
    target = nnx.state(nnx.Dict(a=FlaxHolder(kernel=jnp.ones((3, 3, 3)))))
    with pytest.raises(InputError, match=r"a\.weight and a\.kernel: their names alone do not tell how a kernel of 3 axes"):
        parity.transfer(tmp_path / "a.pt", target)


def test_a_layer_without_a_rule_is_not_guessed(tmp_path, monkeypatch):
    model = nn.ModuleDict({"a": nn.Bilinear(2, 2, 2)})
    with pytest.raises(InputError, match=r"a\.weight belongs to a torch\.nn\.Bilinear, for which no rule is known"):
        parity.transfer(model, tmp_path / "a.msgpack")
    parity.transfer(model, tmp_path / "a.pt")


def test_like_must_have_the_names_that_the_file_holds(tmp_path):
    with pytest.raises(InputError, match=r"a\.pt is to hold PyTorch's names, but like has Flax's"):
        parity.transfer(TorchPair(), tmp_path / "a.pt", like=FlaxPair())
    with pytest.raises(InputError, match=r"a\.msgpack is to hold Flax's names, but like has PyTorch's"):
        parity.transfer(TorchPair(), tmp_path / "a.msgpack", like=TorchPair())
    for options in ({"like": FlaxPair()}, {"overwrite": True}):
        with pytest.raises(InputError, match="like and overwrite are for a target that is a path"):
            parity.transfer(TorchPair(), FlaxPair(), **options)


def test_what_a_format_cannot_hold_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"safetensors has no dtype complex128; write another kind of file, or cast"):
        parity.transfer({"z": torch.ones(2, dtype=torch.complex128)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=r"a has no elements, and Orbax stores no empty arrays"):
        parity.transfer(FlaxHolder(a=jnp.ones((0, 3))), tmp_path / "a.orbax")
    # Known to both sides as a name, but a tree cannot hold it.
    safetensors.torch.save_file({"a": torch.ones(1), "a.bias": torch.ones(1)}, tmp_path / "s.safetensors", {"format": "flax"})
    with pytest.raises(InputError, match=r"a\.bias is an array and a is one too; a tree cannot hold both"):
        parity.transfer(tmp_path / "s.safetensors", tmp_path / "a.msgpack")


def test_an_empty_file_of_weights_is_refused(tmp_path):
    safetensors.torch.save_file({}, tmp_path / "a.safetensors")
    refused(tmp_path / "a.safetensors", "neither side has parameters", target=nnx.Dict())


def test_all_problems_of_a_file_come_in_one_error(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(whole({"a": entry((3,)), "b": entry(dtype="F5"), "c": entry((2,), (8, 12))}))
    with pytest.raises(InputError, match="3 problems"):
        parity.transfer(tmp_path / "a.safetensors", FlaxPair())


@pytest.mark.parametrize(
    ("text", "words"), [("", "is empty"), ("[", "no valid JSON"), ("[]", "holds a list"), ('{"a":"b","a":"c"}', "twice")]
)
def test_a_damaged_rename_file_is_refused(text, words, tmp_path):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(InputError, match=words):
        parity.transfer(TorchPair(), FlaxPair(), rename=tmp_path / "r.json")


def test_parts_and_whole_are_each_others_reverse():
    assert whole(*parts(GOOD)) == GOOD
