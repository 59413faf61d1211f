import gc

import jax.numpy as jnp
import pytest
import torch
from flax import nnx

import parity
from parity.weights import collector


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_afterwards_as_it_was(on):
    before = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        with collector.waiting():
            assert not gc.isenabled()
        assert gc.isenabled() is on
        with pytest.raises(parity.TransferError):
            parity.transfer({"a": torch.ones(2)}, nnx.State({"b": nnx.Param(jnp.ones(2))}), copy=False)
        assert gc.isenabled() is on
        parity.transfer({"a": torch.ones(2)}, nnx.State({"a": nnx.Param(jnp.ones(2))}), copy=False)
        assert gc.isenabled() is on
    finally:
        (gc.enable if before else gc.disable)()
