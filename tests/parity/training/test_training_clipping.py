"""Gradient clipping against torch's own."""

import math

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn
from training_helpers import Torch, gradients, parted, start

import parity


def by_torch(clip, grads):
    model = Torch(start(str(next(iter(grads.values())).dtype)))
    for name, p in model.named_parameters():
        p.grad = torch.tensor(grads[name])
    clip(model.parameters())
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def by_optax(tx, grads):
    return {name: np.asarray(g) for name, g in jax.jit(lambda g: tx.update(g, tx.init(g))[0])(grads).items()}


def one(dtype):
    return {name: g[3] for name, g in gradients(4, dtype).items()}


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [1e-6, 0.7, 1e3])
def test_the_norm_is_clipped_as_in_torch(max_norm, norm_type):
    with jax.enable_x64(True):
        grads = one("float64")
        expected = by_torch(lambda p: nn.utils.clip_grad_norm_(p, max_norm, norm_type), grads)
        assert parted(by_optax(parity.clip_grad_norm(max_norm, norm_type), grads), expected) < 1e-15


def test_optaxs_own_has_no_epsilon():
    with jax.enable_x64(True):
        grads = one("float64")
        expected = by_torch(lambda p: nn.utils.clip_grad_norm_(p, 0.7), grads)
        assert 1e-8 < parted(by_optax(optax.clip_by_global_norm(0.7), grads), expected) < 1e-5


@pytest.mark.parametrize("clip_value", [0.01, 0.5])
def test_values_are_clipped_as_in_torch(clip_value):
    grads = one("float32")
    expected = by_torch(lambda p: nn.utils.clip_grad_value_(p, clip_value), grads)
    assert parted(by_optax(parity.clip_grad_value(clip_value), grads), expected) == 0


def test_float32_and_a_norm_that_is_no_number():
    grads = one("float32")
    expected = by_torch(lambda p: nn.utils.clip_grad_norm_(p, 0.7), grads)
    assert parted(by_optax(parity.clip_grad_norm(0.7), grads), expected) < 3e-7
    grads["b"][1] = np.nan
    found = by_optax(parity.clip_grad_norm(0.7), grads)
    assert all(np.isnan(g).all() for g in found.values())
    assert all(np.isnan(g).all() for g in by_torch(lambda p: nn.utils.clip_grad_norm_(p, 0.7), grads).values())
