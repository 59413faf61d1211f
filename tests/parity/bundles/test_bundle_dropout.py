"""A torch model in train mode is recorded with its masks, and a Flax model drops by them."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import parity

RATE = 0.4


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 10), nn.Dropout(RATE), nn.Linear(10, 5)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.first(x))))


class FlaxDropping(nnx.Module):
    def __init__(self, rate=RATE, before=False, *, rngs):
        self.first, self.last = nnx.Linear(6, 10, rngs=rngs), nnx.Linear(10, 5, rngs=rngs)
        self.drop, self.before = nnx.Dropout(rate, rngs=rngs), before

    def __call__(self, x):
        x = self.first(x)
        return self.last(jnp.tanh(self.drop(x)) if self.before else self.drop(jnp.tanh(x)))


X = np.random.default_rng(0).standard_normal((4, 3, 6), dtype=np.float32)


@pytest.fixture(scope="module")
def ours():
    torch.manual_seed(0)
    return Dropping().train()


@pytest.fixture(scope="module")
def bundle(ours, tmp_path_factory):
    return parity.record(ours, X, path=tmp_path_factory.mktemp("drops") / "drops.safetensors", dropout="replay")


def ported(ours, **settings):
    theirs = FlaxDropping(**settings, rngs=nnx.Rngs(0))
    parity.transfer(ours, theirs)
    return theirs


def test_the_same_masks_give_the_same_verdict_as_a_comparison(ours, bundle):
    theirs = ported(ours)
    there, here = parity.compare(ours, theirs, X, dropout="replay"), parity.replay(bundle, theirs)
    assert there.passed and here.passed, str(here)
    assert [(one.level, one.status, one.figures) for one in there.levels] == [
        (one.level, one.status, one.figures) for one in here.levels
    ]


def test_both_drop_really(ours, bundle):
    theirs = ported(ours)
    theirs.eval()
    report = parity.replay(bundle, theirs, levels=["structure", "identical"])
    assert not report.passed
    assert report.trace.first_divergence().path == "drop"


@pytest.mark.parametrize(
    ("settings", "told"), [(dict(rate=0.3), "p=0.4 in torch, rate=0.3 in Flax"), (dict(before=True), "identical  FAILED")]
)
def test_a_model_that_drops_otherwise_is_found(ours, bundle, settings, told):
    report = parity.replay(bundle, ported(ours, **settings))
    assert not report.passed
    assert told in str(report)


def test_masks_of_a_flax_model_are_not_recorded(ours, tmp_path):
    with pytest.raises(parity.InputError, match="records the masks of a torch model, which are replayed in Flax"):
        parity.record(ported(ours), X, path=tmp_path / "f.safetensors", dropout="replay")
    with pytest.raises(parity.InputError, match="dropout must be None or 'replay', got 'yes'"):
        parity.record(ours, X, path=tmp_path / "f.safetensors", dropout="yes")
    with pytest.raises(parity.InputError, match="in train mode"):
        parity.record(ours, X, path=tmp_path / "f.safetensors")
    assert not list(tmp_path.iterdir())


def test_one_that_drops_and_one_that_does_not_are_no_pair(ours, bundle, tmp_path):
    theirs = ported(ours)
    theirs.eval()
    still = parity.record(theirs, X, path=tmp_path / "still.safetensors")
    with pytest.raises(parity.InputError, match="one of them drops, the other does not; replay the one that drops"):
        parity.bundle_diff(bundle, still)
