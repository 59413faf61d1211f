import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from dropout_pairs import Drops, FlaxDrops, X
from flax import linen
from torch import nn

import parity
from parity import threefry


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("partitionable", [True, False])
def test_masks_and_keys_are_those_of_jax_bit_for_bit(x64, partitionable):
    with jax.enable_x64(x64), jax.threefry_partitionable(partitionable):
        for seed in (0, 2**31 - 1):
            key, ours = jax.random.key(seed), threefry.key_of(seed)
            assert np.array_equal(jax.random.key_data(key), ours)
            key, ours = jax.random.fold_in(key, 2**32 - 1), threefry.fold_in(ours, 2**32 - 1)
            assert np.array_equal(jax.random.key_data(key), ours)
            # Odd and even counts of elements, none, and a mask without axes.
            for shape in ((), (3, 5, 7), (4, 2), (0, 3)):
                for keep in (0.1, 0.7):
                    expected = np.asarray(jax.random.bernoulli(key, keep, shape))
                    dtype = "float64" if x64 else "float32"
                    actual = threefry.bernoulli(ours, keep, shape, dtype=dtype, partitionable=partitionable)
                    assert actual.shape == expected.shape and np.array_equal(actual, expected)


def test_the_two_settings_and_the_two_widths_differ():
    masks = [
        threefry.bernoulli(threefry.key_of(1), 0.5, (64,), dtype=dtype, partitionable=part).tobytes()
        for dtype in ("float32", "float64")
        for part in (True, False)
    ]
    assert len(set(masks)) == 4


def test_keys_of_linen():
    class Inner(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dropout(0.5, deterministic=False, name="d")(x), self.make_rng("dropout"), self.make_rng("dropout")

    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x):
            return Inner(name="inner")(x)

    y, _, second = Outer().apply({}, X, rngs={"dropout": jax.random.key(3)})
    root = threefry.key_of(3)
    assert np.array_equal(threefry.linen_key(root, ("inner",), 2), jax.random.key_data(second))
    mask = threefry.bernoulli(threefry.linen_key(root, ("inner", "d"), 1), 0.5, X.shape)
    assert np.array_equal(mask, np.asarray(y) != 0)
    model = nn.Sequential()
    model.add_module("inner", nn.Dropout(0.5))
    with parity.threefry_dropout(model, lambda path, n: threefry.linen_key(root, (path, "d"), n + 1)):
        assert np.array_equal(model(torch.from_numpy(X)) != 0, mask)


def test_torch_drops_as_the_flax_model_will():
    model, flax = Drops(), FlaxDrops()
    for _ in range(2):
        # The second time its streams have gone on.
        with parity.threefry_dropout(model, flax):
            y = model(torch.from_numpy(X))
        np.testing.assert_allclose(flax(X), y, rtol=1e-6, atol=1e-5)
    model.c = nn.Dropout()
    message = "there is no key for c; the Flax model draws nothing there"
    with pytest.raises(parity.DivergenceError, match=message), parity.threefry_dropout(model, flax):
        [model(torch.from_numpy(X)), model.c(torch.from_numpy(X))]


@pytest.mark.parametrize("keys", [5, threefry.key_of(5), jax.random.key(5), jax.random.PRNGKey(5)], ids=type)
def test_one_key_for_all_drops(keys):
    model = Drops()
    with parity.threefry_dropout(model, keys), parity.record_dropout(model) as masks:
        model(torch.from_numpy(X))
    for number, (drop, keep) in enumerate(zip(masks.drops, (0.75, 0.6), strict=True)):
        expected = jax.random.bernoulli(jax.random.fold_in(jax.random.key(5), number), keep, drop.shape)
        assert np.array_equal(drop.mask, expected)


def test_wrong_keys():
    ours = parity.Linen(linen.Dropout(0.5, deterministic=False), {}, X)
    for model, keys, message in (
        (Drops(), "seed", "a threefry key is two uint32, as jax.random.key_data shows them, got <U4"),
        (Drops(), -1, r"a seed is from 0 to 2\^64 - 1, got -1"),
        (Drops(), ours, "parity.linen.Linen has no keys of its own; record its masks and replay them instead"),
        (FlaxDrops(), 0, "threefry_dropout takes a torch.nn.Module, got .*FlaxDrops"),
    ):
        with pytest.raises(parity.InputError, match=message), parity.threefry_dropout(model, keys):
            pass
    with pytest.raises(parity.InputError, match=r"dtype must be float32, or float64 .* got 'int8'"):
        threefry.bernoulli(threefry.key_of(0), 0.5, (3,), dtype="int8")


def test_torch_needs_no_jax_for_it():
    code = (
        "import sys, torch, parity; model = torch.nn.Dropout(0.5)\n"
        "with parity.threefry_dropout(model, 0): model(torch.ones(3))\n"
        "assert 'jax' not in sys.modules and 'flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
