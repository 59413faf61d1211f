"""Arrays under several names: kept as one, told where one side has them apart, restored from what could not hold them."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoint_helpers import Tied
from flax import nnx
from torch import nn
from transfer_helpers import FlaxHolder, bits, rngs, scramble, snapshot

import parity
from parity import TransferError


class One(nnx.Module):
    """Flax's usual form of a tied head: the embedding alone."""

    def __init__(self):
        self.embed = nnx.Embed(7, 3, rngs=rngs())


class Two(One):
    """One array under two names."""

    def __init__(self):
        super().__init__()
        self.head = FlaxHolder(weight=self.embed.embedding)


class Apart(One):
    """Two arrays."""

    def __init__(self):
        super().__init__()
        self.head = nnx.Linear(3, 7, use_bias=False, rngs=rngs())


def untied() -> nn.Module:
    model = Tied()
    model.head = nn.Linear(3, 7, bias=False)
    return model


def weight() -> np.ndarray:
    return scramble(Tied(), "between").embed.weight.detach().numpy()


ENDS = (".safetensors", ".pt", ".msgpack", ".orbax")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("make", [One, Two, Apart])
def test_a_tie_goes_through_every_kind_of_file_and_back(make, end, tmp_path):
    source = scramble(Tied(), "between")
    like = source if end in (".safetensors", ".pt") else make()
    there = parity.transfer(source, tmp_path / f"a{end}", like=like, verify=True)
    assert there.ties == (("embed.weight", "head.weight"),)
    # What the file could not say is told where it is lost, and where it comes back.
    assert bool(there.lost_ties) == (end in (".msgpack", ".orbax") and make is not One)
    target = make()
    into = parity.transfer(tmp_path / f"a{end}", target)
    assert bits(target.embed.embedding[...]) == bits(weight())
    assert bool(into.lost_ties) == (make is Apart and end in (".safetensors", ".pt"))
    back = scramble(Tied(), "other")
    done = parity.transfer(tmp_path / f"a{end}", back)
    assert done.passed
    assert snapshot(back) == snapshot(source)
    assert back.head.weight is back.embed.weight
    restored = [note for note in done.notes if "are one array in the target" in note]
    assert len(restored) == (end in (".msgpack", ".orbax") and make is not One)
    assert all("embed.embedding and head." in note and "hold the same values" in note for note in restored)


def test_two_arrays_of_a_file_that_differ_are_not_made_one(tmp_path):
    parity.transfer(scramble(untied(), "differ"), tmp_path / "a.msgpack", like=Apart())
    target = scramble(Tied(), "kept")
    before = snapshot(target)
    with pytest.raises(TransferError, match=r"embed\.embedding and head\.kernel are separate arrays in the source, but"):
        parity.transfer(tmp_path / "a.msgpack", target)
    assert snapshot(target) == before


def test_equal_arrays_of_a_model_that_are_apart_may_become_one_and_it_is_told():
    source = untied()
    source.head.weight.data = source.embed.weight.data.clone()
    done = parity.transfer(source, Two())
    assert not done.passed
    assert "embed.embedding and head.weight are one array, but embed.weight and head.weight are separate" in done.lost_ties[0]


def test_a_tie_that_nothing_arrives_for_twice_is_filled_once():
    target = scramble(Tied(), "filled")
    assert parity.transfer({"embed.weight": torch.from_numpy(weight().copy())}, target).passed
    assert bits(target.head.weight) == bits(weight())
    two = Two()
    assert parity.transfer({"head.weight": torch.from_numpy(weight().copy())}, two).passed
    assert bits(two.embed.embedding[...]) == bits(weight())


def test_one_array_does_not_fill_two_that_are_apart():
    with pytest.raises(TransferError, match=r"head\.weight \(7, 3\) of the target gets nothing from the source"):
        parity.transfer(One(), untied())


def test_an_array_with_two_names_may_be_cut_under_one_of_them():
    source = scramble(Tied(), "between")
    target = nnx.Dict(low=nnx.Param(jnp.zeros((4, 3))), high=nnx.Param(jnp.zeros((3, 3))))
    rename = {"embed.weight[0:4]": "low", "embed.weight[4:]": "high"}
    there = parity.transfer(source, target, rename=rename)
    assert there.ties == (("embed.weight", "head.weight"),)
    assert bits(target.high[...]) == bits(weight()[4:])
    back = scramble(Tied(), "other")
    assert parity.transfer(target, back, rename=rename).passed
    assert snapshot(back) == snapshot(source)
    assert back.head.weight is back.embed.weight


def test_layers_that_are_one_in_torch_and_a_stack_in_flax_are_told():
    layer = scramble(nn.Linear(3, 3), "albert")
    source = nn.ModuleDict({"layers": nn.ModuleList([layer, layer])})
    target = nnx.Dict(layers=FlaxHolder(kernel=jnp.zeros((2, 3, 3)), bias=jnp.zeros((2, 3))))
    rename = {"layers.{i}.weight": "layers.kernel[{i}] | transposed", "layers.{i}.bias": "layers.bias[{i}]"}
    done = parity.transfer(source, target, rename=rename)
    assert done.ties == (("layers.0.weight", "layers.1.weight"), ("layers.0.bias", "layers.1.bias"))
    assert "layers.0.weight and layers.1.weight are one array, but layers.kernel[0] and layers.kernel[1] are separate" in str(
        done
    )
    back = nn.ModuleDict({"layers": nn.ModuleList([shared := nn.Linear(3, 3), shared])})
    parity.transfer(target, back, rename=rename)
    assert snapshot(back) == snapshot(source)
    target.layers.bias.set_value(jnp.arange(6.0).reshape(2, 3))
    with pytest.raises(TransferError, match=r"layers\.bias\[0\] and layers\.bias\[1\] are separate arrays in the source"):
        parity.transfer(target, back, rename=rename)
