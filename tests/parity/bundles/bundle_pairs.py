"""A small pair for the tests of bundles: ids, a mask by name, a tuple in a dict, and twins with one planted fault."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen, nnx
from torch import nn

import parity


class TorchSmall(nn.Module):
    """An embedding, a norm, a projection: gives the scores, and under `inner` what they come from."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, ids, scale, mask=None):
        y = self.norm(self.embed(ids) * scale[..., None])
        y = y if mask is None else y.masked_fill(mask[..., None], float("nan"))
        return {"scores": self.out(torch.relu(y)), "inner": (y, ids + 1)}


class FlaxSmall(nnx.Module):
    def __init__(self, epsilon: float = 1e-5, dtype: Any = jnp.float32):
        kept: Any = {"rngs": nnx.Rngs(0), "param_dtype": dtype}
        self.embed, self.out = nnx.Embed(7, 8, dtype=dtype, **kept), nnx.Linear(8, 5, **kept)
        self.norm = nnx.LayerNorm(8, epsilon=epsilon, use_fast_variance=False, **kept)

    def __call__(self, ids, scale, mask=None):
        y = self.norm(self.embed(ids) * scale[..., None])
        y = y if mask is None else jnp.where(mask[..., None], jnp.nan, y)
        return {"scores": self.out(jax.nn.relu(y)), "inner": (y, ids + 1)}


class LinenSmall(linen.Module):
    epsilon: float = 1e-5

    @linen.compact
    def __call__(self, ids, scale, mask=None):
        y = linen.Embed(7, 8, name="embed")(ids) * scale[..., None]
        y = linen.LayerNorm(epsilon=self.epsilon, use_fast_variance=False, name="norm")(y)
        y = y if mask is None else jnp.where(mask[..., None], jnp.nan, y)
        return {"scores": linen.Dense(5, name="out")(jax.nn.relu(y)), "inner": (y, ids + 1)}


class TorchPicture(nn.Module):
    """Channels first, then attention over what is hidden in part."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.att = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x, key_padding_mask):
        y = torch.relu(self.norm(self.conv(x)))
        z = y.flatten(2).transpose(1, 2)
        return self.att(z, z, z, key_padding_mask=key_padding_mask, need_weights=False)[0], y


class FlaxPicture(nnx.Module):
    """Channels last inside; attention is given its input once."""

    def __init__(self, epsilon: float = 1e-5, shift: int = 0):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(3, 4, (3, 3), padding=1, rngs=rngs)
        self.norm = nnx.GroupNorm(4, num_groups=2, epsilon=epsilon, use_fast_variance=False, rngs=rngs)
        self.att, self.shift = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs), shift

    def __call__(self, x, key_padding_mask):
        y = jax.nn.relu(self.norm(self.conv(x.transpose(0, 2, 3, 1))))
        z = y.reshape(y.shape[0], -1, 4)
        shown = jnp.roll(~key_padding_mask, self.shift, -1)[:, None, None, :]
        return self.att(z, mask=shown), y.transpose(0, 3, 1, 2)


def picture_pair(**faults: Any) -> tuple[nn.Module, nnx.Module]:
    torch.manual_seed(5)
    model, port = TorchPicture().eval(), FlaxPicture(**faults)
    port.eval()
    return model, parity.transfer(model, port, ignore=("norm.eps",) if "epsilon" in faults else ()).value


def picture() -> tuple[np.ndarray, np.ndarray]:
    hidden = np.zeros((2, 6), bool)
    hidden[1, 4:] = True
    return np.random.default_rng(4).standard_normal((2, 3, 2, 3)).astype(np.float32), hidden


def torch_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    model = TorchSmall().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    return model.to(dtype)


def flax_model(model: nn.Module, ignore: Any = ("norm.eps",), **faults: Any) -> nnx.Module:
    made = FlaxSmall(**faults)
    made.eval()
    return parity.transfer(model, made, ignore=ignore if faults.get("epsilon") else ()).value


def linen_model(model: nn.Module, **faults: Any) -> parity.Linen:
    made = parity.Linen(LinenSmall(**faults), None, np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32))
    return parity.transfer(model, made, ignore=("norm.eps",) if faults else ()).value


def ids() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 7, (2, 3))


def scale() -> np.ndarray:
    return np.random.default_rng(2).uniform(0.5, 2, (2, 3)).astype(np.float32)


def mask() -> np.ndarray:
    return np.array([[False, True, False], [False, False, True]])


def statuses(report: parity.Report) -> dict[str, str]:
    return {level.level: level.status for level in report.levels}
