"""Ties, settings, and what a Transfer tells of itself."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn
from transfer_helpers import FlaxHolder, Holder, bits, rngs, scramble, snapshot

import parity
from parity import TransferError

# ---------------------------------------------------------------- ties


class TorchTied(nn.Module):
    def __init__(self, tied: bool = True):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class Attending(nnx.Module):
    """The usual Flax form of a tied head: none at all."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(7, 3, rngs=rngs)


class Separate(Attending):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.head = nnx.Linear(3, 7, use_bias=False, rngs=rngs)


class SharedParam(Attending):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.head = FlaxHolder(weight=self.embed.embedding)


NAMES = ("embed.weight", "head.weight")


@pytest.mark.parametrize("cls", [SharedParam, Attending])
@pytest.mark.parametrize("form", [lambda m: m, lambda m: m.state_dict()], ids=["module", "state_dict"])
@pytest.mark.parametrize("flax_form", [lambda m: m, nnx.state], ids=["flax", "state"])
def test_a_tie_is_kept_in_both_directions(cls, form, flax_form):
    source, target = scramble(TorchTied(), "tied"), flax_form(cls(rngs()))
    there = parity.transfer(form(source), target)
    assert there.passed, str(there)
    assert there.ties == (NAMES,)
    assert snapshot(there.value)["embed.embedding"] == snapshot(source)["embed.weight"]
    back = parity.transfer(there.value, form(scramble(TorchTied(), "other")))
    assert back.passed, str(back)
    assert snapshot(back.value) == snapshot(source)
    made = back.value.state_dict() if isinstance(back.value, nn.Module) else back.value
    assert made["head.weight"].data_ptr() == made["embed.weight"].data_ptr()


def test_a_tie_that_the_target_lacks_is_reported():
    done = parity.transfer(scramble(TorchTied(), "lost"), Separate(rngs()))
    assert not done.passed
    assert done.ties == (NAMES,)
    assert len(done.lost_ties) == 1
    assert "embed.weight and head.weight are one array, but embed.embedding and head.kernel are separate in Flax" in str(done)
    assert bits(done.value.head.kernel[...]) == bits(done.value.embed.embedding[...].T)


def test_a_tie_that_the_source_lacks_is_refused():
    target = SharedParam(rngs())
    before = snapshot(target)
    with pytest.raises(TransferError, match=r"separate arrays in the source, but embed\.embedding and head\.weight are"):
        parity.transfer(TorchTied(tied=False), target)
    assert snapshot(target) == before


def test_a_tied_flax_source_into_separate_torch_is_reported():
    done = parity.transfer(SharedParam(rngs()), TorchTied(tied=False))
    assert "are separate in torch" in done.lost_ties[0]


def test_a_module_used_twice_is_a_tie():
    layer, flax_layer = nn.Linear(3, 3), nnx.Linear(3, 3, rngs=rngs())
    shared, apart = nn.ModuleDict({"a": layer, "b": layer}), nnx.Dict(a=flax_layer, b=nnx.Linear(3, 3, rngs=rngs()))
    done = parity.transfer(shared, apart)
    assert done.ties == (("a.weight", "b.weight"), ("a.bias", "b.bias"))
    assert len(done.lost_ties) == 2
    assert parity.transfer(shared, nnx.Dict(a=flax_layer, b=flax_layer)).passed


def test_separate_empty_parameters_are_no_tie():
    source = Holder(a=torch.zeros(0, 2), b=torch.zeros(0, 2))
    assert parity.transfer(source, FlaxHolder(a=jnp.zeros((0, 2)), b=jnp.zeros((0, 2)))).ties == ()


def test_two_views_of_one_memory_are_no_tie():
    whole = torch.arange(8.0)
    assert parity.transfer({"a": whole[:4], "b": whole[4:]}, FlaxHolder(a=jnp.zeros(4), b=jnp.zeros(4))).ties == ()


# ---------------------------------------------------------------- settings

GOOD = dict(epsilon=1e-5, use_fast_variance=False)
SETTINGS = {
    "eps": (
        lambda: nn.LayerNorm(4),
        lambda r: nnx.LayerNorm(4, use_fast_variance=False, rngs=r),
        "eps=1e-05 in torch, epsilon=1e-06 in Flax; set epsilon=1e-05",
    ),
    "fast-variance": (
        lambda: nn.LayerNorm(4),
        lambda r: nnx.LayerNorm(4, epsilon=1e-5, rngs=r),
        "use_fast_variance=True in Flax, wanted False",
    ),
    "plain-norm-eps": (
        lambda: nn.LayerNorm(4, eps=1e-3, elementwise_affine=False),
        lambda r: nnx.LayerNorm(4, use_bias=False, use_scale=False, **GOOD, rngs=r),
        "eps=0.001 in torch, epsilon=1e-05 in Flax",
    ),
    "rate": (lambda: nn.Dropout(0.1), lambda r: nnx.Dropout(0.2, rngs=r), "p=0.1 in torch, rate=0.2 in Flax; set rate=0.1"),
    "broadcast": (
        lambda: nn.Dropout(0.1),
        lambda r: nnx.Dropout(0.1, broadcast_dims=(0,), rngs=r),
        "broadcast_dims=(0,) in Flax, wanted ()",
    ),
    "padding": (
        lambda: nn.Embedding(5, 3, padding_idx=0),
        lambda r: nnx.Embed(5, 3, rngs=r),
        "padding_idx=0 in torch, wanted None",
    ),
    "max-norm": (lambda: nn.Embedding(5, 3, max_norm=1.0), lambda r: nnx.Embed(5, 3, rngs=r), "max_norm=1.0 in torch"),
    "frequency": (
        lambda: nn.Embedding(5, 3, scale_grad_by_freq=True),
        lambda r: nnx.Embed(5, 3, rngs=r),
        "scale_grad_by_freq=True in torch",
    ),
    "linear-dtype": (
        lambda: nn.Linear(3, 4),
        lambda r: nnx.Linear(3, 4, dtype=jnp.bfloat16, rngs=r),
        "dtype=bfloat16 makes the Flax layer compute in bfloat16, torch computes in float32",
    ),
    "norm-dtype": (
        lambda: nn.LayerNorm(4),
        lambda r: nnx.LayerNorm(4, dtype=jnp.float16, **GOOD, rngs=r),
        "dtype=float16 makes the Flax layer compute in float16",
    ),
    "embed-dtype": (
        lambda: nn.Embedding(5, 3),
        lambda r: nnx.Embed(5, 3, dtype=jnp.bfloat16, rngs=r),
        "dtype=bfloat16 makes the Flax layer compute in bfloat16",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("to_flax", [True, False])
def test_a_setting_that_differs_is_reported_and_fails(name, to_flax):
    make_torch, make_flax, words = SETTINGS[name]
    pair = [
        nn.ModuleDict({"block": nn.Sequential(nn.Linear(1, 2), make_torch())}),
        nnx.Dict(block=nnx.Sequential(nnx.Linear(1, 2, rngs=rngs()), make_flax(rngs()))),
    ]
    done = parity.transfer(*(pair if to_flax else pair[::-1]))
    assert len(done.settings) == 1
    assert done.settings[0].startswith(f"block.1: {words}")
    assert not done.passed
    assert f"  setting: block.1: {words}" in str(done)


def test_a_root_layer_is_called_the_model():
    done = parity.transfer(nn.LayerNorm(4), nnx.LayerNorm(4, rngs=rngs()))
    assert len(done.settings) == 2
    assert all(sentence.startswith("the model: ") for sentence in done.settings)


def test_equal_settings_pass_with_half_precision_on_both_sides():
    target = nnx.Linear(3, 4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs())
    assert parity.transfer(nn.Linear(3, 4).to(torch.bfloat16), target).passed


def test_settings_follow_a_rename():
    done = parity.transfer(
        nn.ModuleDict({"norm": nn.LayerNorm(4)}), nnx.Dict(ln=nnx.LayerNorm(4, rngs=rngs())), rename={"norm": "ln"}
    )
    assert len(done.settings) == 2


# ---------------------------------------------------------------- the result


def small() -> parity.Transfer:
    source = nn.ModuleDict({"lin": nn.Linear(3, 5), "norm": nn.LayerNorm(5), "drop": nn.Dropout(0.5), "extra": nn.Linear(1, 1)})
    target = nnx.Dict(lin=nnx.Linear(3, 5, rngs=rngs()), norm=nnx.LayerNorm(5, rngs=rngs()), drop=nnx.Dropout(0.5, rngs=rngs()))
    return parity.transfer(source, target, ignore="extra.*")


def test_the_text_shows_the_plan_and_all_that_matters():
    text = str(small())
    for line in (
        "4 arrays, 120 bytes, all copied",
        "  lin.weight  -> lin.kernel  transposed, (3, 5) float32, 60 bytes",
        "  norm.weight -> norm.scale  as is, (5,) float32, 20 bytes",
        "  left out: extra.weight",
        "  random state, and what runs leave behind, stays: 2 arrays",
        "  setting: norm: eps=1e-05 in torch, epsilon=1e-06 in Flax; set epsilon=1e-05",
    ):
        assert line in text.splitlines(), line


def test_the_text_tells_of_casts_sharing_ties_and_guesses():
    cast = parity.transfer(Holder(w=torch.ones(2)), FlaxHolder(w=jnp.ones(2, jnp.bfloat16)), cast="target")
    assert "w -> w  as is, (2,) float32 -> bfloat16" in str(cast)
    assert "  1 layouts were decided by name, no layer type being known" in str(cast)
    shared = parity.transfer(FlaxHolder(w=jnp.ones(2)), Holder(w=torch.ones(2)), copy=False)
    assert str(shared).endswith("\n1 arrays, 8 bytes, 1 of them sharing memory")
    tied = parity.transfer(TorchTied(), Separate(rngs()))
    assert "  one array: embed.weight, head.weight" in str(tied)
    assert "  tie lost: " in str(tied)


def test_the_data_is_json_without_the_value():
    done = small()
    data = json.loads(json.dumps(done.to_dict(), allow_nan=False))
    assert "value" not in data
    assert data["passed"] is False
    assert data["ignored"] == ["extra.weight", "extra.bias"]
    assert data["plan"][0] == {
        "source": "lin.weight",
        "target": "lin.kernel",
        "layout": "transposed",
        "shape": [3, 5],
        "dtype": "float32",
        "target_dtype": "float32",
        "bytes": 60,
        "decided_by": "rule",
        "shared": False,
        "merged": [],
    }
    assert set(data) == {
        *("plan", "ignored", "random", "ties", "lost_ties", "settings", "alone", "notes", "verified", "passed"),
        *("unpaired", "problems", "arrays", "bytes", "kind", "schema", "hints"),
    }


def test_a_result_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        small().plan = ()


class TorchWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(7, 6, padding_idx=0), nn.LayerNorm(6)

    def forward(self, ids):
        return self.norm(self.words(ids))


class FlaxWords(nnx.Module):
    def __init__(self, rngs):
        self.words = nnx.Embed(7, 6, rngs=rngs)
        self.norm = nnx.LayerNorm(6, epsilon=1e-5, use_fast_variance=False, rngs=rngs)

    def __call__(self, ids):
        return self.norm(self.words(ids))


def test_a_setting_that_may_disagree_is_left_out_of_the_verdict_and_said_so():
    pair = TorchWords().eval(), FlaxWords(nnx.Rngs(0))
    assert "padding_idx=0 in torch" in parity.transfer(*pair).settings[0]
    done = parity.transfer(*pair, ignore="*.padding_idx")
    assert done.settings == () and done.passed
    said = "a setting is left out of the verdict, as asked: words: padding_idx=0 in torch"
    assert done.notes[0].startswith(said)
    ids = np.array([[1, 2, 0], [4, 6, 3]], np.int32)
    report = parity.compare(*pair, ids, levels=["weights", "identical"], ignore=["words.padding_idx"])
    assert report.passed and report.level("weights").notes[0].startswith(said) and said in str(report)
    # Another setting of the same layer still counts, and so does the same of another.
    pair[1].norm.epsilon = 1e-6
    failed = parity.transfer(*pair, ignore="*.padding_idx")
    assert len(failed.settings) == 1 and "eps=1e-05 in torch" in failed.settings[0]
    with pytest.raises(parity.TransferError, match=r"'words\.eps' fits no leaf of either side and no setting that disagrees"):
        parity.transfer(*pair, ignore="words.eps")


@pytest.mark.parametrize("pattern", ["padding_idx", "*.padding_idx"])
def test_a_setting_of_the_model_itself_is_left_out_by_its_name(pattern):
    pair = nn.Embedding(7, 6, padding_idx=0).eval(), nnx.Embed(7, 6, rngs=nnx.Rngs(0))
    assert parity.transfer(*pair).settings[0].startswith("the model: padding_idx=0 in torch")
    done = parity.transfer(*pair, ignore=pattern)
    assert done.passed
    assert done.notes[0].startswith("a setting is left out of the verdict, as asked: the model: padding_idx=0")
    with pytest.raises(parity.TransferError, match="'max_norm' fits no leaf of either side and no setting that disagrees"):
        parity.transfer(*pair, ignore="max_norm")
