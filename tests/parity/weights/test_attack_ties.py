"""One array of the target under several names: what arrives at each must be the same."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import parity
from parity.errors import TransferError


class Torch(nn.Module):
    def __init__(self, tied: bool = True):
        super().__init__()
        self.e, self.l = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        if tied:
            self.l.weight = self.e.weight


class Flax(nnx.Module):
    def __init__(self, tied: bool = True):
        self.e, self.l = nnx.Embed(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(1))
        if tied:
            # As it is stored: another function than torch's tie, whose Linear takes it transposed.
            self.l.kernel = self.e.embedding


@pytest.mark.parametrize("direction", ["to Flax", "to torch", "file"])
def test_a_tie_in_two_layouts_is_refused(direction, tmp_path):
    ours, theirs = Torch(), Flax()
    before = ours.e.weight.detach().clone(), np.asarray(theirs.e.embedding[...])
    arguments = {"to Flax": (ours, theirs), "to torch": (theirs, ours), "file": (ours, tmp_path / "a.safetensors")}[direction]
    with pytest.raises(TransferError, match="would arrive in different layouts: as is and transposed"):
        parity.transfer(*arguments, like=theirs if direction == "file" else None)
    assert torch.equal(ours.e.weight, before[0]) and np.array_equal(theirs.e.embedding[...], before[1])
    assert not list(tmp_path.iterdir())


def test_what_is_its_own_transpose_may_be_tied_so():
    ours, theirs = Torch(), Flax()
    nn.init.eye_(ours.e.weight)
    assert parity.transfer(ours, theirs).passed
    assert np.array_equal(theirs.e.embedding[...], np.eye(4))


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_array_that_is_cut_under_one_of_its_names(same):
    whole = np.arange(16, dtype=np.float32).reshape(4, 4)
    source = {"a": whole[:2], "b": whole[2:], "l": {"kernel": whole.T if same else whole}}
    ours, rename = Torch(), {"e.weight[0:2]": "a", "e.weight[2:4]": "b"}
    before = ours.e.weight.detach().clone()
    tree = {"params": {k: {"kernel": jnp.array(v["kernel"])} if k == "l" else jnp.array(v) for k, v in source.items()}}
    if not same:
        with pytest.raises(TransferError, match=r"are separate arrays in the source, but .*l\.weight are one"):
            parity.transfer(tree, ours, rename=rename)
        assert torch.equal(ours.e.weight, before)
    else:
        parity.transfer(tree, ours, rename=rename)
        assert torch.equal(ours.e.weight, torch.from_numpy(whole))


def test_an_abstract_source_is_told_to_be_that_alone():
    with pytest.raises(TransferError) as error:
        parity.transfer(nnx.eval_shape(lambda: Flax(tied=False)), Torch())
    assert all("is abstract" in problem for problem in error.value.problems)


def test_a_path_with_brackets_is_ignored_by_its_own_name():
    state = {"a[0].weight": torch.ones(2), "b": torch.ones(3)}
    assert parity.transfer(state, {"b": torch.zeros(3)}, ignore=("a[0].weight",)).ignored == ("a[0].weight",)


def test_a_missing_orbax_folder_is_told_to_be_missing(tmp_path):
    with pytest.raises(parity.InputError, match=r"no\.orbax does not exist; check the path"):
        parity.transfer(tmp_path / "no.orbax", {"b": torch.zeros(3)})


def test_an_interrupted_orbax_checkpoint_leaves_nothing_and_prints_nothing(tmp_path, capfd):
    class Stop(BaseException):
        pass

    def stop(sent: int, total: int, name: str) -> None:
        raise Stop

    with pytest.raises(Stop):
        parity.transfer({"params": {"w": jnp.ones(3)}}, tmp_path / "a.orbax", progress=stop)
    assert not list(tmp_path.iterdir())
    assert "Traceback" not in capfd.readouterr().err
