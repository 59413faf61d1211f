from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from dropout_pairs import E, X
from flax import linen, nnx
from torch import nn

import parity

LEVELS = ("structure", "identical", "native", "gradients")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(E, E), nn.Dropout(0.3), nn.BatchNorm1d(5)

    def forward(self, x):
        return self.norm(x + self.drop(self.linear(x))).tanh()


class FlaxBlock(nnx.Module):
    def __init__(self, fault: str = ""):
        rngs = nnx.Rngs(0)
        self.fault = fault
        self.linear, self.drop = nnx.Linear(E, E, rngs=rngs), nnx.Dropout(0.2 if fault == "rate" else 0.3, rngs=rngs)
        self.norm = nnx.BatchNorm(5, use_running_average=True, axis=1, momentum=0.9, epsilon=1e-5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y = self.linear(x)
        return jnp.tanh(self.norm(self.drop(x + y) if self.fault == "place" else x + self.drop(y)))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = x + linen.Dropout(0.3, deterministic=False, name="drop")(linen.Dense(E, name="linear")(x))
        norm = linen.BatchNorm(use_running_average=True, axis=1, momentum=0.9, epsilon=1e-5, name="norm")
        return jnp.tanh(norm(x))


def pair(fault: str = "") -> tuple[nn.Module, Any]:
    model, flax = Block(), FlaxBlock(fault)
    parity.transfer(model, flax)
    model.norm.eval()
    return model, flax


def test_a_model_in_train_mode_is_compared_with_the_same_masks():
    model, flax = pair()
    state = torch.get_rng_state()
    report = parity.compare(model, flax, X, dropout="replay", levels=LEVELS)
    report.raise_for_divergence()
    assert report.passed and [level.status for level in report.levels] == ["passed"] * 4
    assert torch.equal(torch.get_rng_state(), state) and not any("parity" in name for name in vars(flax.drop))


def test_a_linen_model_too():
    model = Block()
    model.norm.eval()
    module = LinenBlock()
    variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.asarray(X))
    made = parity.transfer(model, parity.Linen(module, variables, jnp.asarray(X), rngs={"dropout": jax.random.key(0)})).value
    report = parity.compare(model, made, X, dropout="replay", levels=("structure", "identical"))
    report.raise_for_divergence()


def test_faults_are_found_at_their_place():
    model, flax = pair("rate")
    report = parity.compare(model, flax, X, dropout="replay", levels=("structure", "identical"))
    assert not report.passed and "drop drops at another rate: expected (torch) 0.3, actual (flax) 0.2" in str(report)
    model, flax = pair("place")
    report = parity.compare(model, flax, X, dropout="replay", levels=("structure", "identical"))
    statuses = {level.level: level.status for level in report.levels}
    assert statuses == {"structure": "passed", "identical": "failed"}
    first = report.trace.first_divergence()
    assert first is not None and first.path == "drop" and first.inputs == "differ"


def test_what_is_refused():
    model, flax = pair()
    with pytest.raises(
        parity.InputError, match=r"call .eval\(\) on it first, or compare it as it drops with .*dropout='replay'"
    ):
        parity.compare(model, flax, X)
    with pytest.raises(parity.InputError, match="dropout must be None or 'replay', got 'same'"):
        parity.compare(model, flax, X, dropout="same")
    model.train()
    with pytest.raises(parity.InputError, match="the torch model is in train mode, and that changes what norm computes"):
        parity.compare(model, flax, X, dropout="replay")
