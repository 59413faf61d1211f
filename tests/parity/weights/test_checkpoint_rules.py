"""Checkpoints whose arrays travel by rows that cut, join and leave out."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import parity
from parity.errors import InputError


class TorchLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 4)
        self.norm = nn.BatchNorm2d(4)
        self.cell = nn.LSTMCell(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        nn.init.zeros_(self.cell.bias_hh)
        for name in ("weight", "bias", "running_mean"):
            nn.init.normal_(getattr(self.norm, name))


class FlaxLayers(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(4, 4, (4, 4), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.cell = nnx.OptimizedLSTMCell(4, 4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)


def equal(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("name", ["a.msgpack", "a.safetensors", "a.orbax"])
def test_a_flax_file_takes_blocks_and_gives_them_back(name, tmp_path):
    source, target = TorchLayers(), TorchLayers()
    nn.init.ones_(target.cell.bias_hh)
    done = parity.transfer(source, tmp_path / name, like=FlaxLayers(), verify=True)
    assert done.verified and any("num_batches_tracked is left out" in sentence for sentence in done.alone)
    back = parity.transfer(tmp_path / name, target, verify=True)
    assert back.verified and equal(source, target)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a"])
def test_a_torch_file_is_joined_from_parts_and_filled_with_zeros(name, tmp_path):
    source, target, told = FlaxLayers(), TorchLayers(), []
    done = parity.transfer(
        source, tmp_path / name, like=TorchLayers(), verify=True, progress=lambda sent, all_, path: told.append((sent, all_))
    )
    assert done.verified and any("cell.bias_hh is filled with zeros" in sentence for sentence in done.alone)
    assert told[-1][0] == told[-1][1]
    nn.init.ones_(target.cell.bias_hh)
    parity.transfer(tmp_path / name, target, ignore=["*num_batches_tracked"])
    direct = TorchLayers()
    parity.transfer(source, direct)
    assert equal(target, direct)


def test_nan_in_a_part_is_told(tmp_path):
    source = TorchLayers()
    with torch.no_grad():
        source.attention.in_proj_weight[0, 0] = torch.nan
    torch.save(source.state_dict(), tmp_path / "a.pt")
    done = parity.transfer(tmp_path / "a.pt", FlaxLayers())
    assert "1 of 16 values of attention.in_proj_weight[q] are NaN; they were sent as they are" in done.notes


def test_certain_rows_give_the_names_of_a_file(tmp_path):
    source = nn.ModuleDict({"conv": nn.Conv2d(4, 4, 4), "norm": nn.BatchNorm2d(4)})
    done = parity.transfer(source, tmp_path / "a.msgpack", verify=True)
    assert done.rename["conv.weight"] == "conv.kernel" and done.rename["norm.running_var"] == "norm.var"
    target = nnx.Dict(conv=nnx.Conv(4, 4, (4, 4), rngs=nnx.Rngs(0)), norm=nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    parity.transfer(tmp_path / "a.msgpack", target)
    want = source["conv"].weight.detach().numpy().transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(jax.device_get(target["conv"].kernel[...]), want)
    parity.transfer(target, tmp_path / "b.pt", verify=True)
    assert torch.equal(torch.load(tmp_path / "b.pt")["conv.weight"], source["conv"].weight)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.MultiheadAttention(4, 2), "in_proj_weight belongs to a torch.nn.MultiheadAttention; what it is called"),
        (nn.MultiheadAttention(4, 2), "out_proj.weight lies in a torch.nn.MultiheadAttention"),
        (nn.ConvTranspose2d(4, 4, 3), "weight belongs to a torch.nn.ConvTranspose2d; what it is called"),
    ],
    ids=["cut", "inside", "setting"],
)
def test_rows_that_need_the_other_layer_give_no_names(layer, words, tmp_path):
    with pytest.raises(InputError, match="give the names of the target with like") as error:
        parity.transfer(nn.ModuleDict({"a": layer}), tmp_path / "a.msgpack")
    assert f"a.{words}" in str(error.value)


@pytest.mark.parametrize("transposed", [True, False])
def test_a_setting_that_a_file_does_not_tell_is_not_guessed(transposed, tmp_path):
    source = nn.ModuleDict({"a": nn.ConvTranspose2d(4, 4, 3)})
    layer = nnx.ConvTranspose(4, 4, (3, 3), transpose_kernel=transposed, rngs=nnx.Rngs(0))
    done = parity.transfer(source, tmp_path / "a.msgpack", like=nnx.Dict(a=layer), verify=True)
    assert done.plan[0].layout == ("channels last" if transposed else "flipped")
    with pytest.raises(InputError, match="a setting of the Flax layer decides how the array is laid out"):
        parity.transfer(tmp_path / "a.msgpack", source)
