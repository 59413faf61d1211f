"""Checkpoints in and out: every kind, every dtype, bit for bit, as their own libraries read and write them."""

import json
import sys
import zipfile

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
import safetensors.torch
import torch
from checkpoint_helpers import DTYPES, ENDS, FlaxPair, Tied, TorchPair, listing, parts, tensors
from flax import nnx
from torch import nn
from transfer_helpers import (
    FlaxHolder,
    Holder,
    TorchNet,
    arrays_only,
    bits,
    flax_net,
    in_flax,
    rngs,
    scramble,
    snapshot,
    transposed,
)

import parity
from parity.weights import files, msgpack_file, shards

# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end or "folder")
def test_a_module_comes_back_bit_for_bit(end, tmp_path):
    source = scramble(TorchNet(), "files")
    ignore = ["empty"] if end == ".orbax" else []
    path = tmp_path / f"model{end}"
    there = parity.transfer(source, path, ignore=ignore, verify=True)
    assert there.passed, str(there)
    assert there.verified
    assert there.value == path
    back = parity.transfer(path, scramble(TorchNet(), "other"), ignore=ignore, verify=True)
    assert {k: v for k, v in snapshot(back.value).items() if k != "empty"} == {
        k: v for k, v in snapshot(source).items() if k != "empty"
    }
    for form in (lambda m: m, nnx.state):
        flax = arrays_only(snapshot(parity.transfer(path, form(flax_net()), ignore=ignore).value))
        assert {k: v for k, v in flax.items() if k != "empty"} == {
            k: v for k, v in in_flax(snapshot(source)).items() if k != "empty"
        }


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end or "folder")
def test_a_flax_module_comes_back_bit_for_bit(end, tmp_path):
    source, path = scramble(flax_net(), "flax files"), tmp_path / f"model{end}"
    ignore = ["empty"] if end == ".orbax" else []
    parity.transfer(source, path, ignore=ignore, verify=True)
    back = arrays_only(snapshot(parity.transfer(path, flax_net(), ignore=ignore).value))
    expected = arrays_only(snapshot(source))
    assert {k: v for k, v in back.items() if k != "empty"} == {k: v for k, v in expected.items() if k != "empty"}


@pytest.mark.parametrize("first", [".safetensors", ".pt", ""])
@pytest.mark.parametrize("second", [".safetensors", ".pt", ""])
def test_every_dtype_goes_from_file_to_file(first, second, tmp_path):
    state = tensors("dtypes")
    parity.transfer(state, tmp_path / f"a{first}")
    done = parity.transfer(tmp_path / f"a{first}", tmp_path / f"b{second}", verify=True)
    back = parity.transfer(tmp_path / f"b{second}", {k: torch.zeros_like(v) for k, v in state.items()}).value
    assert snapshot(back) == snapshot(state)
    assert {e.dtype for e in done.plan} == set(DTYPES)


@pytest.mark.parametrize("end", [".msgpack", ".orbax"])
def test_every_dtype_goes_through_a_tree(end, tmp_path):
    with jax.enable_x64(True):
        state = nnx.state(
            FlaxHolder(**{k.replace(".", "_"): jnp.array(np.asarray(v)) for k, v in arrays(tensors("tree")).items()})
        )
        parity.transfer(state, tmp_path / f"a{end}", verify=True)
        parity.transfer(tmp_path / f"a{end}", tmp_path / "b.msgpack", verify=True)
        assert snapshot(parity.transfer(tmp_path / "b.msgpack", state).value) == snapshot(state)


def arrays(state):
    from parity.frameworks.torch import to_numpy

    return {name: to_numpy(tensor) for name, tensor in state.items()}


# ---------------------------------------------------------------- as their own libraries have it


def test_safetensors_reads_what_is_written_and_the_other_way_round(tmp_path):
    state = tensors("own")
    parity.transfer(state, tmp_path / "a.safetensors")
    assert snapshot(safetensors.torch.load_file(tmp_path / "a.safetensors")) == snapshot(state)
    safetensors.torch.save_file(state, tmp_path / "b.safetensors", {"epoch": "3"})
    zeros = {k: torch.zeros_like(v) for k, v in state.items()}
    assert snapshot(parity.transfer(tmp_path / "b.safetensors", zeros).value) == snapshot(state)
    assert (tmp_path / "a.safetensors").stat().st_size % 8 == len(parts((tmp_path / "a.safetensors").read_bytes())[1]) % 8


def test_torch_reads_what_is_written(tmp_path):
    state = tensors("torch")
    parity.transfer(state, tmp_path / "a.pt")
    for mmap in (False, True):
        assert snapshot(torch.load(tmp_path / "a.pt", weights_only=True, mmap=mmap)) == snapshot(state)
    assert zipfile.ZipFile(tmp_path / "a.pt").testzip() is None
    fresh = TorchNet()
    parity.transfer(scramble(TorchNet(), "load"), tmp_path / "net.pth")
    fresh.load_state_dict(torch.load(tmp_path / "net.pth"))
    assert snapshot(fresh) == snapshot(scramble(TorchNet(), "load"))


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_what_torch_writes_is_read(new, tmp_path):
    state = tensors("legacy")
    state = {k: v for k, v in state.items() if new or not k.startswith("float8")} | {"strided": torch.arange(12.0).view(3, 4).T}
    torch.save(state, tmp_path / "a.bin", _use_new_zipfile_serialization=new)
    zeros = {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in state.items()}
    assert snapshot(parity.transfer(tmp_path / "a.bin", zeros).value) == snapshot(state)


def test_flax_reads_what_is_written_and_the_other_way_round(tmp_path):
    source = scramble(flax_net(), "msgpack")
    parity.transfer(source, tmp_path / "a.msgpack")
    tree = flax.serialization.msgpack_restore((tmp_path / "a.msgpack").read_bytes())
    assert bits(tree["layers"]["1"]["model"]["layers"]["0"]["kernel"]) == bits(source.layers[1].model.layers[0].kernel[...])
    variables = {"params": {"Dense_0": {"kernel": jnp.arange(6.0).reshape(2, 3)}}, "step": 7, "name": "x"}
    (tmp_path / "b.msgpack").write_bytes(flax.serialization.to_bytes(variables))
    done = parity.transfer(tmp_path / "b.msgpack", {"Dense_0.weight": torch.zeros(3, 2)})
    assert bits(done.value["Dense_0.weight"]) == transposed(bits(variables["params"]["Dense_0"]["kernel"]))
    assert done.notes == ("b.msgpack: no arrays, so left out: step, name",)


def test_arrays_too_large_for_one_msgpack_object_are_cut_as_flax_cuts_them(tmp_path, monkeypatch):
    monkeypatch.setattr(msgpack_file, "CHUNK", 64)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 64)
    state = nnx.state(FlaxHolder(w=jnp.arange(77.0).reshape(7, 11), v=jnp.arange(3.0)))
    parity.transfer(state, tmp_path / "a.msgpack", verify=True)
    tree = flax.serialization.msgpack_restore((tmp_path / "a.msgpack").read_bytes())
    assert bits(tree["w"]) == bits(state["w"][...])
    (tmp_path / "b.msgpack").write_bytes(flax.serialization.msgpack_serialize({"w": np.arange(77.0).reshape(7, 11)}))
    assert b"__msgpack_chunked_array__" in (tmp_path / "b.msgpack").read_bytes()
    got = parity.transfer(tmp_path / "b.msgpack", {"w": torch.zeros(7, 11, dtype=torch.float64)}).value
    assert bits(got["w"]) == bits(np.arange(77.0).reshape(7, 11))


@pytest.mark.parametrize("form", ["tree", "state"])
def test_orbax_folders_are_read_as_orbax_writes_them(form, tmp_path):
    model = scramble(FlaxPair(), "orbax")
    value = nnx.state(model) if form == "state" else nnx.to_pure_dict(nnx.state(model))
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "step", value)
    got = parity.transfer(tmp_path / "step", scramble(FlaxPair(), "other")).value
    assert snapshot(got) == snapshot(model)
    got = parity.transfer(tmp_path / "step", TorchPair()).value
    assert bits(got.dense.weight) == transposed(bits(model.dense.kernel[...]))


def test_orbax_reads_what_is_written(tmp_path):
    model = scramble(FlaxPair(), "orbax")
    parity.transfer(model, tmp_path / "a.orbax")
    with ocp.StandardCheckpointer() as reader:
        tree = reader.restore(tmp_path / "a.orbax", nnx.to_pure_dict(nnx.state(model)))
    assert bits(tree["dense"]["kernel"]) == bits(model.dense.kernel[...])


def test_shards_are_as_the_hub_has_them(tmp_path, monkeypatch):
    state = {f"layers.{i}.weight": torch.full((4, 4), float(i)) for i in range(11)}
    monkeypatch.setattr(shards, "SHARD", 3 * 64)
    parity.transfer(state, tmp_path / "model", verify=True)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 11 * 64}
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert index["weight_map"]["layers.10.weight"] == "model-00004-of-00004.safetensors"
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "model" / file, "pt") as shard:
            assert bits(shard.get_tensor(name)) == bits(state[name])


def test_new_shards_replace_old_ones_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD", 64)
    folder = tmp_path / "model"
    parity.transfer({"a": torch.ones(16), "b": torch.ones(16)}, folder)
    (folder / "config.json").write_text("{}")
    parity.transfer({"c": torch.zeros(16)}, folder, overwrite=True)
    assert len(listing(folder)) == 3
    assert (folder / "config.json").exists()
    assert snapshot(parity.transfer(folder, {"c": torch.ones(16)}).value) == snapshot({"c": torch.zeros(16)})


# ---------------------------------------------------------------- ties, strides, metadata


@pytest.mark.parametrize("end", [".safetensors", "", ".pt"])
def test_a_tie_is_written_once_and_restored(end, tmp_path):
    source, path = scramble(Tied(), "tied"), tmp_path / f"a{end}"
    there = parity.transfer(source, path, verify=True)
    assert there.passed
    assert there.ties == (("embed.weight", "head.weight"),)
    assert sum(len(content) for content in listing(tmp_path).values()) < 2 * 7 * 3 * 4 + 2000
    middle = parity.transfer(path, tmp_path / "again.pt")
    assert middle.ties == there.ties
    state = torch.load(tmp_path / "again.pt")
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    back = parity.transfer(path, scramble(Tied(), "other"))
    assert back.passed
    assert snapshot(back.value) == snapshot(source)


def test_a_tie_is_read_as_safetensors_records_it(tmp_path):
    safetensors.torch.save_model(Tied(), str(tmp_path / "a.safetensors"))
    assert parity.transfer(tmp_path / "a.safetensors", Tied()).ties == (("embed.weight", "head.weight"),)


def test_a_tie_that_a_file_cannot_hold_is_called_lost_and_written_twice(tmp_path):
    source = scramble(Tied(), "tied")
    done = parity.transfer(source, tmp_path / "a.msgpack", verify=True)
    assert not done.passed
    assert "embed.weight and head.weight are one array, but" in done.lost_ties[0]
    tree = flax.serialization.msgpack_restore((tmp_path / "a.msgpack").read_bytes())
    assert bits(tree["head"]["kernel"]) == transposed(bits(tree["embed"]["embedding"]))


@pytest.mark.parametrize("end", [".safetensors", ".pt"])
def test_strided_and_overlapping_tensors_are_written_as_they_read(end, tmp_path):
    memory = torch.arange(40.0)
    state = {"t": memory[:12].view(3, 4).T, "step": memory[::3], "front": memory[:8], "inner": memory[2:6]}
    parity.transfer(state, tmp_path / f"a{end}", verify=True)
    zeros = {k: torch.zeros(v.shape) for k, v in state.items()}
    back = parity.transfer(tmp_path / f"a{end}", zeros)
    assert snapshot(back.value) == snapshot(state)
    assert back.ties == ()


@pytest.mark.parametrize("end", [".safetensors", ""])
def test_metadata_is_kept_from_file_to_file(end, tmp_path):
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", {"format": "pt", "epoch": "3", "note": "ä"})
    parity.transfer(tmp_path / "a.safetensors", tmp_path / f"b{end}")
    (file,) = (tmp_path / f"b{end}").glob("*.safetensors") if not end else [tmp_path / f"b{end}"]
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "epoch": "3", "note": "ä"}


@pytest.mark.parametrize("shape", [(64, 64), (130, 200), (1, 65), (65, 1), (0, 70)])
def test_transposed_arrays_are_written_whole_also_beyond_one_tile(shape):
    array = np.random.default_rng(0).standard_normal(shape).astype("float32")
    for view in (array, array.T, array[::2, ::3], array.T[::-1]):
        assert b"".join(files.row_major(view)) == view.tobytes()


def test_metadata_without_a_place_is_told(tmp_path):
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", {"format": "pt", "epoch": "3"})
    notes = parity.transfer(tmp_path / "a.safetensors", tmp_path / "b.pt").notes
    assert "b.pt: metadata left out, for torch.save has no place for it: epoch" in notes


def test_nan_is_sent_and_reported(tmp_path):
    state = {
        "all": torch.full((2, 2), float("nan")),
        "some": torch.tensor([1.0, -float("nan")]).bfloat16(),
        "none": torch.ones(2),
    }
    state["eight"] = torch.tensor([float("nan"), 448.0]).to(torch.float8_e4m3fn)
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    done = parity.transfer(tmp_path / "a.safetensors", {k: torch.zeros_like(v) for k, v in state.items()})
    assert snapshot(done.value) == snapshot(state)
    assert [note for note in done.notes if "NaN" in note] == [
        "4 of 4 values of all are NaN; they were sent as they are",
        "1 of 2 values of eight are NaN; they were sent as they are",
        "1 of 2 values of some are NaN; they were sent as they are",
    ]
    assert "note: 4 of 4 values of all are NaN" in str(done)


# ---------------------------------------------------------------- whose names, and which layout


def test_layers_decide_where_a_model_is_written_under_the_others_names(tmp_path):
    source = scramble(TorchPair(), "names")
    done = parity.transfer(source, tmp_path / "a.msgpack")
    assert {(e.source, e.target, e.layout, e.decided_by) for e in done.plan} == {
        ("dense.weight", "dense.kernel", "transposed", "rule"),
        ("dense.bias", "dense.bias", "as is", "rule"),
        ("norm.weight", "norm.scale", "as is", "rule"),
        ("norm.bias", "norm.bias", "as is", "rule"),
    }
    model = FlaxPair()
    parity.transfer(tmp_path / "a.msgpack", model)
    assert snapshot(model) == snapshot(parity.transfer(source, FlaxPair()).value)
    parity.transfer(model, tmp_path / "b.pt", verify=True)
    assert snapshot(torch.load(tmp_path / "b.pt")) == snapshot(source)


def test_flax_names_are_certain_enough_for_torch(tmp_path):
    source = scramble(TorchPair(), "names")
    parity.transfer(source, tmp_path / "a.msgpack")
    done = parity.transfer(tmp_path / "a.msgpack", tmp_path / "b.pt")
    assert "dense.kernel -> dense.weight  transposed by name, (4, 4) float32, 64 bytes" in str(done)
    assert snapshot(torch.load(tmp_path / "b.pt")) == snapshot(source)


@pytest.mark.parametrize("like", ["model", "state", "file"])
def test_like_gives_names_where_torch_names_are_not_certain(like, tmp_path):
    source = scramble(TorchPair(), "like")
    parity.transfer(source, tmp_path / "a.pt")
    given = {"model": FlaxPair(), "state": nnx.state(FlaxPair()), "file": tmp_path / "like.msgpack"}[like]
    parity.transfer(FlaxPair(), tmp_path / "like.msgpack")
    done = parity.transfer(tmp_path / "a.pt", tmp_path / "b.msgpack", like=given, verify=True)
    assert {e.decided_by for e in done.plan} == ({"rule"} if like == "model" else {"name"})
    assert snapshot(parity.transfer(tmp_path / "b.msgpack", FlaxPair()).value) == snapshot(
        parity.transfer(source, FlaxPair()).value
    )


def test_between_files_of_one_framework_names_stay(tmp_path):
    parity.transfer(FlaxPair(), tmp_path / "a.msgpack")
    done = parity.transfer(tmp_path / "a.msgpack", tmp_path / "b.safetensors")
    assert all(e.source == e.target and e.layout == "as is" for e in done.plan)
    with safetensors.safe_open(tmp_path / "b.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "flax"}
    assert parity.transfer(tmp_path / "b.safetensors", TorchPair()).plan[1].layout == "transposed"


def test_names_tell_whose_they_are_where_metadata_does_not(tmp_path):
    safetensors.torch.save_file({"dense.kernel": torch.arange(6.0).view(2, 3)}, tmp_path / "a.safetensors")
    done = parity.transfer(tmp_path / "a.safetensors", nn.ModuleDict({"dense": nn.Linear(2, 3, bias=False)}))
    assert "a.safetensors: the names are Flax's, they end in kernel" in done.notes
    assert bits(done.value["dense"].weight.detach().T) == bits(torch.arange(6.0).view(2, 3))


def test_a_rename_names_the_arrays_of_a_file(tmp_path):
    source = scramble(TorchPair(), "rename")
    done = parity.transfer(source, tmp_path / "a.pt", rename={"dense": "out.proj", "norm.bias": "norm.shift"})
    assert {e.target for e in done.plan} == {"out.proj.weight", "out.proj.bias", "norm.weight", "norm.shift"}
    done = parity.transfer(source, tmp_path / "a.msgpack", rename={"dense": "out.proj"})
    assert "out.proj.kernel" in {e.target for e in done.plan}
    parity.transfer(tmp_path / "a.msgpack", tmp_path / "b.pt", rename={"dense": "out.proj"})
    assert snapshot(torch.load(tmp_path / "b.pt")) == snapshot(source)


def test_ignored_leaves_are_not_in_the_file(tmp_path):
    parity.transfer(TorchPair(), tmp_path / "a.msgpack", ignore=["norm.*"])
    assert set(flax.serialization.msgpack_restore((tmp_path / "a.msgpack").read_bytes())) == {"dense"}


def test_a_cast_is_written(tmp_path):
    parity.transfer(TorchPair(), tmp_path / "a.safetensors", cast="bfloat16", verify=True)
    loaded = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert {t.dtype for t in loaded.values()} == {torch.bfloat16}


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_weights_in_a_training_checkpoint_are_found_and_told(key, tmp_path):
    source = scramble(TorchPair(), "wrapped")
    adam = torch.optim.Adam(source.parameters()).state_dict()
    torch.save({"epoch": 3, key: source.state_dict(), "optimizer": adam}, tmp_path / "a.pt")
    done = parity.transfer(tmp_path / "a.pt", TorchPair())
    assert snapshot(done.value) == snapshot(source)
    assert f"a.pt: the weights are under '{key}'; left out: epoch, optimizer" in done.notes


def test_what_is_no_tensor_in_a_state_dict_is_told(tmp_path):
    torch.save({"w": torch.ones(2), "version": 3}, tmp_path / "a.pt")
    assert parity.transfer(tmp_path / "a.pt", {"w": torch.zeros(2)}).notes == ("a.pt: no tensors, so left out: version",)


def test_a_dry_run_plans_and_writes_nothing(tmp_path):
    done = parity.transfer(TorchPair(), tmp_path / "a.safetensors", dry=True)
    assert done.value is None
    assert len(done.plan) == 4
    assert not done.verified
    assert not list(tmp_path.iterdir())
    target = scramble(FlaxPair(), "dry")
    before = snapshot(target)
    parity.transfer(TorchPair(), target, dry=True)
    assert snapshot(target) == before


def test_progress_counts_every_byte_once(tmp_path):
    seen = []
    parity.transfer(TorchPair(), tmp_path / "a.safetensors", verify=True, progress=lambda *args: seen.append(args))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][0] == seen[-1][1] == 4 * (16 + 4 + 4 + 4)
    assert len(seen) == 4


def test_the_source_of_a_file_may_be_its_target(tmp_path):
    source = scramble(TorchPair(), "self")
    parity.transfer(source, tmp_path / "a.safetensors")
    parity.transfer(tmp_path / "a.safetensors", tmp_path / "a.safetensors", overwrite=True, verify=True)
    assert snapshot(parity.transfer(tmp_path / "a.safetensors", TorchPair()).value) == snapshot(source)


@pytest.mark.parametrize("end", [".safetensors", ".pt"])
def test_no_later_write_shows_in_a_model_that_came_from_a_file(end, tmp_path):
    source, path = Holder(w=torch.arange(4096.0).view(64, 64), v=torch.arange(64.0)), tmp_path / f"a{end}"
    parity.transfer(source, path)
    target, ours = FlaxHolder(w=jnp.zeros((64, 64)), v=jnp.zeros(64)), Holder(w=torch.zeros(64, 64), v=torch.zeros(64))
    for model in (target, ours):
        assert not any(entry.shared for entry in parity.transfer(path, model, copy=False).plan)
    before = snapshot(target)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert {name: bits(torch.from_dlpack(getattr(target, name)[...])) for name in before} == before
    assert snapshot(ours) == snapshot(source)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
def test_pages_that_were_given_back_are_read_again(tmp_path, monkeypatch):
    source = {f"p{i}": torch.full((2048,), float(i)) for i in range(9)}
    torch.save(source, tmp_path / "a.pt")
    monkeypatch.setattr("parity.frameworks.torch.files.MAPPED", 10_000)
    mine = torch.load(tmp_path / "a.pt", mmap=True)
    mine["p3"].fill_(-1)
    done = parity.transfer(tmp_path / "a.pt", {k: torch.zeros(2048) for k in source}, verify=True)
    assert snapshot(done.value) == snapshot(source)
    # Another reader of the same file keeps what it wrote into its own pages.
    assert set(mine["p3"].tolist()) == {-1.0}


def test_a_rename_may_be_a_file(tmp_path):
    done = parity.transfer(TorchPair(), FlaxPair())
    (tmp_path / "r.json").write_text(json.dumps(done.rename))
    again = parity.transfer(TorchPair(), FlaxPair(), rename=tmp_path / "r.json")
    assert again.rename == done.rename


def test_abstract_models_are_filled_from_files(tmp_path):
    source = scramble(TorchPair(), "abstract")
    parity.transfer(source, tmp_path / "a.safetensors")
    target = nnx.eval_shape(lambda: FlaxPair(nnx.Rngs(0)))
    parity.transfer(tmp_path / "a.safetensors", target)
    assert snapshot(target) == snapshot(parity.transfer(source, FlaxPair(rngs())).value)
