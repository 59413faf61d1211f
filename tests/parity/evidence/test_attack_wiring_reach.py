"""The level wiring where one array has two places, and where a Flax model names its half precision itself."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

import parity


class TorchTied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(self.embed(ids))


class FlaxTied(nnx.Module):
    def __init__(self, rngs, shift=0):
        self.embed, self.shift = nnx.Embed(7, 4, rngs=rngs), shift

    def __call__(self, ids):
        return self.embed.attend(jnp.roll(self.embed(ids), self.shift, -1))


IDS = np.array([[1, 2, 6], [0, 3, 3]])


def tied(shift=0):
    torch.manual_seed(0)
    model = TorchTied().eval()
    return model, parity.transfer(model, FlaxTied(nnx.Rngs(0), shift)).value


def level(report):
    [found] = report.levels
    return found.status


@pytest.mark.parametrize(("shift", "status"), [(0, "passed"), (1, "failed")])
def test_both_places_of_a_tied_array_get_the_probe(shift, status, tmp_path):
    model, port = tied(shift)
    assert level(parity.compare(model, port, IDS, levels=["wiring"], diagnose=False)) == status
    bundle = parity.record(model, IDS, path=tmp_path / "tied.safetensors", gradients=False)
    assert level(parity.replay(bundle, port, levels=["wiring"], diagnose=False)) == status


def half_pair(dtype, kind):
    """Its products have 12 bits and more, which half precision cannot hold."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).to(getattr(torch, dtype)).eval()
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(jnp.dtype(dtype))
    options = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(dtype)}
    nnx_made = nnx.Linear(4, 3, rngs=nnx.Rngs(0), **options)
    made = nnx_made if kind == "nnx" else parity.Linen(linen.Dense(3, **options), None, x)
    return model, parity.transfer(model, made).value, x


@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_port_that_names_its_own_half_precision_is_probed_in_float32(kind, dtype):
    model, port, x = half_pair(dtype, kind)
    assert level(parity.compare(model, port, x, levels=["wiring"], diagnose=False)) == "passed"


def test_what_is_cut_to_less_than_the_deployed_dtype_is_still_seen():
    model, port, x = half_pair("float16", "nnx")
    dot = port.dot_general
    port.dot_general = lambda x, *rest, **given: dot(x.astype(jnp.float8_e4m3fn).astype(x.dtype), *rest, **given)
    assert level(parity.compare(model, port, x, levels=["wiring"], diagnose=False)) == "failed"
