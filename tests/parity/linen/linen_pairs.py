"""Torch models and their Linen mirrors in both styles, `setup` and `@compact`, with faults that can be planted."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from evidence_pairs import draw, normal
from flax import linen as nn

import parity

WIDTH, HEADS, DEPTH = 8, 2, 2


class TorchCore(torch.nn.Module):
    def forward(self, q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


class TorchBlock(torch.nn.Module):
    """Attention and a feed-forward network, each behind a LayerNorm and around a residual."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.core = TorchCore()
        self.ffn = torch.nn.Sequential(torch.nn.Linear(WIDTH, 12), torch.nn.GELU(), torch.nn.Linear(12, WIDTH))

    def forward(self, x):
        n, y = x.shape[0], self.norm1(x)
        q, k, v = (f(y).reshape(n, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(self.core(q, k, v).transpose(1, 2).reshape(n, -1, WIDTH))
        return x + self.ffn(self.norm2(x))


class TorchEncoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(TorchBlock() for _ in range(DEPTH))
        self.heads = torch.nn.ModuleDict({"left": torch.nn.Linear(WIDTH, 3), "right": torch.nn.Linear(WIDTH, WIDTH)})

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.heads["left"](x), self.heads["right"](x)


class Core(nn.Module):
    swapped: bool = False

    def __call__(self, q, k, v):
        q, k = (k, q) if self.swapped else (q, k)
        return jax.nn.softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


class GELU(nn.Module):
    approximate: bool = False

    def __call__(self, x):
        return jax.nn.gelu(x, approximate=self.approximate)


def split(x):
    return x.reshape(x.shape[0], -1, HEADS, WIDTH // HEADS).swapaxes(1, 2)


def merged(x):
    return x.swapaxes(1, 2).reshape(x.shape[0], -1, WIDTH)


def layer_norm(fault: str, **name: Any) -> nn.Module:
    return nn.LayerNorm(epsilon=1e-6 if fault == "epsilon" else 1e-5, use_fast_variance=False, **name)


class SetupBlock(nn.Module):
    fault: str = ""

    def setup(self):
        self.norm1, self.norm2 = layer_norm(self.fault), layer_norm("")
        self.q, self.k, self.v, self.out = (nn.Dense(WIDTH) for _ in range(4))
        self.core = Core(self.fault == "query and key swapped")
        self.ffn = nn.Sequential([nn.Dense(12), GELU(self.fault == "tanh gelu"), nn.Dense(WIDTH)])

    def __call__(self, x):
        y = self.norm1(x)
        x = x + self.out(merged(self.core(split(self.q(y)), split(self.k(y)), split(self.v(y)))))
        return x + self.ffn(self.norm2(x))


class CompactBlock(nn.Module):
    fault: str = ""

    @nn.compact
    def __call__(self, x):
        y = layer_norm(self.fault, name="norm1")(x)
        q, k, v = (split(nn.Dense(WIDTH, name=name)(y)) for name in "qkv")
        mixed = Core(self.fault == "query and key swapped", name="core")(q, k, v)
        x = x + nn.Dense(WIDTH, name="out")(merged(mixed))
        # A Sequential in a compact module does not own the layers that it is given: they are Dense_0 and Dense_1 here.
        ffn = nn.Sequential([nn.Dense(12), GELU(self.fault == "tanh gelu"), nn.Dense(WIDTH)], name="ffn")
        return x + ffn(layer_norm("", name="norm2")(x))


class SetupEncoder(nn.Module):
    fault: str = ""

    def setup(self):
        self.layers = [SetupBlock(self.fault if i == 1 else "") for i in range(DEPTH)]
        self.heads = {"left": nn.Dense(3), "right": nn.Dense(WIDTH)}

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.heads["left"](x), self.heads["right"](x)


class CompactEncoder(nn.Module):
    fault: str = ""

    @nn.compact
    def __call__(self, x):
        for i in range(DEPTH):
            x = nn.remat(CompactBlock)(self.fault if i == 1 else "", name=f"layers_{i}")(x)
        return nn.Dense(3)(x), nn.Dense(WIDTH)(x)


# What no name tells: the heads of the compact mirror have automatic names.
RENAMES: dict[type, dict[str, str]] = {
    SetupEncoder: {},
    CompactEncoder: {"heads.left": "Dense_0", "heads.right": "params.Dense_1"},
}
STYLES = (SetupEncoder, CompactEncoder)


def x() -> np.ndarray:
    return normal(3, 4, WIDTH, name="encoder")


def empty_encoder() -> parity.Linen:
    """The mirror without values, for the command line."""
    return parity.Linen(SetupEncoder(), None, x())


def encoder(style: type, fault: str = "") -> tuple[torch.nn.Module, parity.Linen]:
    """The pair; a fault is planted in the code of the second block."""
    model = draw(TorchEncoder(), "linen encoder")
    return model, parity.transfer(model, parity.Linen(style(fault), None, x()), rename=RENAMES[style]).value


def altered(model: parity.Linen, path: str, change: Callable[[np.ndarray], np.ndarray]) -> parity.Linen:
    """The model with one array changed by a function of its NumPy array."""

    def put(keys: Any, array: Any) -> Any:
        return jnp.asarray(change(np.array(array))) if ".".join(key.key for key in keys) == path else array

    return model.replaced(variables=jax.tree_util.tree_map_with_path(put, model.variables))


class TorchConv(torch.nn.Module):
    """Convolutions with BatchNorm, pooled, and a Dropout that evaluation leaves out."""

    def __init__(self):
        super().__init__()
        self.conv_1, self.conv_2 = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Conv2d(4, 4, (3, 2), stride=2)
        self.bn_1, self.bn_2 = torch.nn.BatchNorm2d(4), torch.nn.BatchNorm2d(4)
        self.drop = torch.nn.Dropout(0.25)
        self.head = torch.nn.Linear(4, 5)

    def forward(self, x):
        x = torch.relu(self.bn_1(self.conv_1(x)))
        x = torch.relu(self.bn_2(self.conv_2(x)))
        return self.head(self.drop(x.mean((2, 3))))


class LinenConv(nn.Module):
    """Takes channels first, as its twin does; trains unless told otherwise."""

    @nn.compact
    def __call__(self, x, train: bool = True):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, use_fast_variance=False)
        x = jnp.moveaxis(x, 1, -1)
        x = nn.relu(norm(name="bn_1")(nn.Conv(4, (3, 3), padding=1, name="conv_1")(x)))
        x = nn.relu(norm(name="bn_2")(nn.Conv(4, (3, 2), strides=2, padding="VALID", name="conv_2")(x)))
        return nn.Dense(5, name="head")(nn.Dropout(0.25, deterministic=not train, name="drop")(x.mean((1, 2))))


def images() -> np.ndarray:
    return normal(2, 3, 6, 5, name="images")


def convolutions(**options: Any) -> tuple[torch.nn.Module, parity.Linen]:
    """The pair, with running statistics that are not those of a new model."""
    model = draw(TorchConv(), "linen conv")
    with torch.no_grad():
        for number, norm in enumerate((model.bn_1, model.bn_2)):
            norm.running_mean.copy_(torch.from_numpy(normal(4, name=number)))
            norm.running_var.copy_(torch.from_numpy(np.abs(normal(4, name=-number)) + 0.5))
    return model, parity.transfer(model, parity.Linen(LinenConv(), None, images(), **(options or {"train": False}))).value
