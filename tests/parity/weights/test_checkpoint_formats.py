"""Shards of both kinds, folders, training states, Orbax's steps and items, and which of several weights is meant."""

import gc
import json
import weakref

import flax.serialization
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.torch
import torch
from checkpoint_helpers import FlaxPair, Tied, TorchPair, listing
from flax import nnx
from flax.training.train_state import TrainState
from transfer_helpers import any_bits, bits, scramble, snapshot, to_tensor

import parity
from parity import InputError
from parity.frameworks import load
from parity.weights import shards
from parity.weights.checkpoint import Source
from parity.weights.files import Slot
from parity.weights.leaf import DTYPES
from parity.weights.msgpack_file import write as write_msgpack

# ---------------------------------------------------------------- every dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_kept_or_refused_by_every_kind(dtype, tmp_path):
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((3, 5)) + 1j * rng.standard_normal((3, 5))
    arrays = {"a.kernel": wide if dtype == "complex128" else any_bits(rng, (3, 5), dtype), "b": np.zeros((), DTYPES[dtype])}
    write_msgpack(tmp_path / "one.msgpack", [Slot((name,), array.shape, dtype) for name, array in arrays.items()], arrays, {})
    for end in (".safetensors", "", ".orbax"):
        if dtype == "complex128" and end != ".orbax":
            with pytest.raises(InputError, match="has no dtype complex128; write another kind of file, or cast"):
                parity.transfer(tmp_path / "one.msgpack", tmp_path / f"a{end}")
            continue
        parity.transfer(tmp_path / "one.msgpack", tmp_path / f"a{end}", verify=True)
        back = {leaf.path: leaf.read() for leaf in Source(tmp_path / f"a{end}").leaves(None)}
        assert {name: bits(array) for name, array in back.items()} == {name: bits(array) for name, array in arrays.items()}
    tensor = torch.from_numpy if dtype == "complex128" else lambda array: to_tensor(array, dtype)
    state = {name: tensor(array.copy()) for name, array in arrays.items()}
    for end in (".pt", ".bin.index.json"):
        parity.transfer(state, tmp_path / f"a{end}", verify=True)
        back = parity.transfer(tmp_path / f"a{end}", {name: torch.zeros_like(tensor) for name, tensor in state.items()})
        assert snapshot(back.value) == snapshot(state)


# ---------------------------------------------------------------- shards and folders


def test_shards_of_torch_are_as_transformers_has_them(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD", 100)
    source = scramble(Tied(), "bin")
    parity.transfer(source, tmp_path / "pytorch_model.bin.index.json", verify=True)
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 84},
        "weight_map": dict.fromkeys(("embed.weight", "head.weight"), "pytorch_model-00001-of-00001.bin"),
    }
    state = {f"layers.{i}.weight": torch.full((4, 4), float(i)) for i in range(3)}
    parity.transfer(state, tmp_path / "pytorch_model.bin.index.json", overwrite=True, verify=True)
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert torch.equal(torch.load(tmp_path / file)[name], state[name])
    assert len(listing(tmp_path)) == 4
    zeros = {name: torch.zeros(4, 4) for name in state}
    assert snapshot(parity.transfer(tmp_path, zeros).value) == snapshot(state)


def test_a_tie_inside_a_shard_of_torch_is_restored(tmp_path):
    source = scramble(Tied(), "bin")
    parity.transfer(source, tmp_path / "pytorch_model.bin.index.json")
    done = parity.transfer(tmp_path, scramble(Tied(), "other"))
    assert done.ties == (("embed.weight", "head.weight"),)
    assert snapshot(done.value) == snapshot(source)


def test_the_files_of_an_index_are_called_like_it(tmp_path):
    parity.transfer(TorchPair(), tmp_path / "vit.safetensors.index.json")
    assert set(listing(tmp_path)) == {"vit.safetensors.index.json", "vit-00001-of-00001.safetensors"}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.ckpt", "flax_model.msgpack", "model.safetensors"])
def test_the_one_checkpoint_of_a_folder_is_found(name, tmp_path):
    source = scramble(TorchPair(), "folder")
    parity.transfer(source, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    assert snapshot(parity.transfer(tmp_path, TorchPair()).value) == snapshot(source)


def test_of_several_kinds_in_a_folder_safetensors_counts_and_others_are_refused(tmp_path):
    source = scramble(TorchPair(), "folder")
    parity.transfer(TorchPair(), tmp_path / "pytorch_model.bin")
    parity.transfer(TorchPair(), tmp_path / "flax_model.msgpack")
    with pytest.raises(InputError, match=r"holds flax_model.msgpack, pytorch_model.bin; a folder must hold one"):
        parity.transfer(tmp_path, TorchPair())
    parity.transfer(source, tmp_path / "model.safetensors")
    assert snapshot(parity.transfer(tmp_path, TorchPair()).value) == snapshot(source)


@pytest.mark.parametrize("end", [".safetensors", ".bin"])
def test_shards_without_their_index_are_no_checkpoint(end, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD", 64)
    parity.transfer(TorchPair(), tmp_path / f"model{end}.index.json")
    (tmp_path / f"model{end}.index.json").unlink()
    for number in (2, 3):
        (tmp_path / f"model-0000{number}-of-00003{end}").unlink()
    with pytest.raises(InputError, match=rf"holds model-00001-of-00003{end} without the index that says what belongs"):
        parity.transfer(tmp_path, TorchPair())


def test_shards_that_the_index_does_not_name_are_told(tmp_path):
    source = scramble(TorchPair(), "extra")
    parity.transfer(source, tmp_path / "model")
    safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "model" / "model-00009-of-00009.safetensors")
    safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "model" / "adapter.safetensors")
    done = parity.transfer(tmp_path / "model", TorchPair())
    assert snapshot(done.value) == snapshot(source)
    told = "model.safetensors.index.json: not named by it, so not read: model-00009-of-00009.safetensors"
    assert told in done.notes


# ---------------------------------------------------------------- training states


def trained() -> TrainState:
    params = {"dense": {"kernel": jnp.arange(16.0).reshape(4, 4), "bias": jnp.arange(4.0)}}
    params |= {"norm": {"scale": jnp.full(4, 2.0), "bias": jnp.full(4, 3.0)}}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def saved(value, path):
    """As Flax or Orbax saves it."""
    if path.suffix == ".msgpack":
        path.write_bytes(flax.serialization.to_bytes(value))
    else:
        with ocp.PyTreeCheckpointer() as saver:
            saver.save(path, value)
    return path


@pytest.mark.parametrize("name", ["a.msgpack", "a.orbax"])
@pytest.mark.parametrize("form", ["params", "variables", "state", "state of variables", "nested"])
def test_the_weights_of_a_training_state_are_taken_and_the_rest_is_told(form, name, tmp_path):
    state = trained()
    value = {
        "params": state.params,
        "variables": {"params": state.params},
        "state": state,
        "state of variables": state.replace(params={"params": state.params}),
        "nested": {"model": state, "config": {"width": np.int32(4)}},
    }[form]
    done = parity.transfer(saved(value, tmp_path / name), FlaxPair())
    assert bits(done.value.dense.kernel[...]) == bits(state.params["dense"]["kernel"])
    assert bits(done.value.norm.bias[...]) == bits(state.params["norm"]["bias"])
    notes = " ".join(done.notes)
    assert ("left out" in notes) is (form not in ("params", "variables"))
    assert ("opt_state" in notes) is (form not in ("params", "variables"))
    # From file to file they keep their names.
    there = parity.transfer(tmp_path / name, tmp_path / "b.msgpack", verify=True)
    assert not any("opt_state" in entry.source for entry in there.plan)


@pytest.mark.parametrize("name", ["a.msgpack", "a.orbax"])
def test_key_names_another_part_of_a_training_state(name, tmp_path):
    state = trained()
    saved(state.replace(opt_state=(state.opt_state[0]._replace(mu=state.params), state.opt_state[1])), tmp_path / name)
    done = parity.transfer(tmp_path / name, FlaxPair(), key="opt_state.0.mu")
    assert bits(done.value.norm.scale[...]) == bits(state.params["norm"]["scale"])
    with pytest.raises(InputError, match=r"has nothing under the key 'ema'; at its top it has .*opt_state"):
        parity.transfer(tmp_path / name, FlaxPair(), key="ema")


def lightning():
    """A checkpoint of Lightning's, whose module is an attribute of the LightningModule, with averaged weights."""
    state = scramble(TorchPair(), "lightning").state_dict()
    ema = scramble(TorchPair(), "ema").state_dict()
    whole = {"state_dict": {f"net.{name}": tensor for name, tensor in state.items()}, "ema": ema}
    return whole | {"epoch": 3, "pytorch-lightning_version": "2.5.0", "optimizer_states": []}, state, ema


def test_the_weights_of_lightning_are_found_and_those_of_another_key_on_request(tmp_path):
    whole, state, ema = lightning()
    torch.save({key: value for key, value in whole.items() if key != "ema"}, tmp_path / "plain.ckpt")
    done = parity.transfer(tmp_path / "plain.ckpt", TorchPair(), rename={"net": ""})
    assert snapshot(done.value) == snapshot(state)
    left = "left out: epoch, pytorch-lightning_version, optimizer_states"
    assert f"plain.ckpt: the weights are under 'state_dict'; {left}" in done.notes
    torch.save(whole, tmp_path / "last.ckpt")
    with pytest.raises(InputError, match="holds tensors under state_dict, ema; say which are meant with key"):
        parity.transfer(tmp_path / "last.ckpt", TorchPair(), rename={"net": ""})
    for key, expected in {"state_dict.net": state, "ema": ema}.items():
        assert snapshot(parity.transfer(tmp_path / "last.ckpt", TorchPair(), key=key).value) == snapshot(expected)
    for key in ("epoch", "state_dict.body", "nowhere"):
        with pytest.raises(InputError, match=rf"has no tensors under the key '{key}'; at its top it has state_dict, ema"):
            parity.transfer(tmp_path / "last.ckpt", TorchPair(), key=key)


def test_key_takes_the_names_that_begin_with_it(tmp_path):
    whole, state, _ = lightning()
    safetensors.torch.save_file(whole["state_dict"] | {"network": torch.ones(1)}, tmp_path / "a.safetensors")
    assert snapshot(parity.transfer(tmp_path / "a.safetensors", TorchPair(), key="net").value) == snapshot(state)
    with pytest.raises(InputError, match="key is for a source that is a path"):
        parity.transfer(TorchPair(), TorchPair(), key="net")


# ---------------------------------------------------------------- Orbax


def manager(path, **items):
    with ocp.CheckpointManager(path, item_names=tuple(items) or None) as opened:
        for step in (9, 10):
            value = {"dense": {"kernel": jnp.full((2, 2), float(step))}}
            args = {name: ocp.args.StandardSave(value) for name in items}
            opened.save(step, args=ocp.args.Composite(**args) if items else ocp.args.StandardSave(value))
        opened.wait_until_finished()


def kernel(path):
    (leaf,) = Source(path).leaves(None)
    assert (leaf.path, leaf.owner, leaf.name) == ("dense.kernel", "dense", "kernel")
    return set(leaf.read().flat)


def test_a_step_of_a_manager_is_read_and_never_chosen(tmp_path):
    manager(tmp_path / "run")
    assert kernel(tmp_path / "run" / "9") == kernel(tmp_path / "run" / "9" / "default") == {9.0}
    with pytest.raises(InputError, match=r"holds steps: 9, 10; give the folder of the one that is meant, such as .*/10"):
        Source(tmp_path / "run")


def test_items_of_a_step_are_told_apart(tmp_path):
    manager(tmp_path / "run", params=1, ema=1)
    opened = Source(tmp_path / "run" / "10")
    assert opened.notes == ("10: the weights are the item 'params'; left out: ema",)
    assert kernel(tmp_path / "run" / "10" / "ema") == {10.0}
    manager(tmp_path / "other", teacher=1, student=1)
    with pytest.raises(InputError, match=r"holds items: student, teacher; give the folder of the one that is meant"):
        Source(tmp_path / "other" / "9")


@pytest.mark.parametrize(
    "options", [{"use_ocdbt": False}, {"use_zarr3": True}, {"use_ocdbt": False, "use_zarr3": True}], ids=str
)
def test_older_and_newer_folders_of_orbax_are_read_and_replaced(options, tmp_path):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as saver:
        saver.save(tmp_path / "a.orbax", args=ocp.args.PyTreeSave({"dense": {"kernel": jnp.full((2, 2), 3.0)}}))
    assert kernel(tmp_path / "a.orbax") == {3.0}
    parity.transfer(nnx.Dict(dense=nnx.Param(jnp.ones(2))), tmp_path / "a.orbax", overwrite=True, verify=True)


def test_orbax_writes_few_arrays_at_a_time(tmp_path, monkeypatch):
    load("nnx.orbax")
    from parity.frameworks.nnx import orbax

    alive, most = set(), []
    original = parity.weights.transfer.travelled

    def counted(*args):
        array = original(*args).copy()
        key = object()
        alive.add(key)
        weakref.finalize(array, alive.discard, key)
        gc.collect()
        most.append(len(alive))
        return array

    monkeypatch.setattr("parity.weights.transfer.travelled", counted)
    monkeypatch.setattr(orbax.OneByOne, "TOGETHER", 0)
    parity.transfer(nnx.Dict(**{f"p{i}": nnx.Param(jnp.full((64, 64), float(i))) for i in range(12)}), tmp_path / "a.orbax")
    assert len(most) == 12
    assert max(most) <= 2
