"""Models of both frameworks that drop, alike or with a planted fault. All sizes are different."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen, nnx
from helpers import random
from torch import nn

import parity
from parity.frameworks.jax.running import QUICK

torch.set_num_threads(1)

N, L, E, HEADS, WIDE = 3, 5, 8, 2, 12
X = random("dropout input").standard_normal((N, L, E)).astype(np.float32)
IMAGES = random("dropout images").standard_normal((N, 2, 5, 7)).astype(np.float32)


def program(model: Any) -> Callable[..., Any]:
    """An NNX model as a compiled function of its arguments, compiled quickly."""
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, *args: nnx.merge(graphdef, state)(*args), compiler_options=QUICK["cpu"])
    return lambda *args: run(state, *args)


def recorded(model: nn.Module, *args: np.ndarray) -> tuple[parity.DropoutMasks, np.ndarray]:
    """The masks of a run of torch, and what it returned, or the first of it."""
    with parity.record_dropout(model) as masks:
        output = model(*map(torch.from_numpy, args))
    first = output[0] if isinstance(output, tuple) else output
    return masks, first.detach().numpy()


# ------------------------------------------------------------------ a layer of torch's own, its twins


def torch_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(E, HEADS, WIDE, 0.2, batch_first=True)


class Layer(nnx.Module):
    """`nn.TransformerEncoderLayer`, post-norm."""

    def __init__(self, rngs: nnx.Rngs, *, remat: bool = False):
        self.self_attn = nnx.MultiHeadAttention(
            HEADS, E, dropout_rate=0.2, broadcast_dropout=False, deterministic=False, decode=False, rngs=rngs
        )
        self.linear1, self.linear2 = nnx.Linear(E, WIDE, rngs=rngs), nnx.Linear(WIDE, E, rngs=rngs)
        self.norm1, self.norm2 = (nnx.LayerNorm(E, epsilon=1e-5, use_fast_variance=False, rngs=rngs) for _ in range(2))
        self.dropout, self.dropout1, self.dropout2 = (nnx.Dropout(0.2, rngs=rngs) for _ in range(3))
        self.remat = remat

    def __call__(self, x: Any) -> Any:
        x = self.norm1(x + self.dropout1(self.self_attn(x)))
        wide = nnx.remat(lambda drop, x: drop(x)) if self.remat else (lambda drop, x: drop(x))
        hidden = wide(self.dropout, jax.nn.relu(self.linear1(x)))
        return self.norm2(x + self.dropout2(self.linear2(hidden)))


class LinenLayer(linen.Module):
    """The same, with names that flax gives."""

    @linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        def dropped(x: Any) -> Any:
            return linen.Dropout(0.2, deterministic=not train)(x)

        def norm(name: str) -> Any:
            return linen.LayerNorm(epsilon=1e-5, use_fast_variance=False, name=name)

        attention = linen.MultiHeadDotProductAttention(
            HEADS, dropout_rate=0.2, broadcast_dropout=False, deterministic=not train, name="self_attn"
        )
        x = norm("norm1")(x + dropped(attention(x)))
        hidden = dropped(jax.nn.relu(linen.Dense(WIDE, name="linear1")(x)))
        return norm("norm2")(x + dropped(linen.Dense(E, name="linear2")(hidden)))


def linen_of(module: linen.Module, model: nn.Module | None = None, **kwargs: Any) -> parity.Linen:
    """A Linen model with the values of a torch model."""
    variables = module.init(jax.random.key(0), jnp.asarray(X))
    made = parity.Linen(module, variables, jnp.asarray(X), rngs={"dropout": jax.random.key(7)}, **kwargs)
    return parity.transfer(model, made).value if model is not None else made


def run_linen(model: parity.Linen, variables: Any, x: Any) -> Any:
    return model.module.apply(variables, x, rngs=model.rngs, **model.kwargs)


# ------------------------------------------------------------------ modules called twice, images, layers of the caller


class Twice(nn.Module):
    """A block that is called twice, and one dropout that two blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.first, self.second = nn.Sequential(nn.Linear(E, E), self.drop), nn.Sequential(nn.Linear(E, E), self.drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.second(self.first(self.first(x))))


class FlaxTwice(nnx.Module):
    """The same. `apart` gives each block a dropout of its own."""

    def __init__(self, rngs: nnx.Rngs, *, apart: bool = False):
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        drops = [nnx.Dropout(0.3, rngs=rngs) if apart else self.drop for _ in range(2)]
        self.first = nnx.Sequential(nnx.Linear(E, E, rngs=rngs), drops[0])
        self.second = nnx.Sequential(nnx.Linear(E, E, rngs=rngs), drops[1])

    def __call__(self, x: Any) -> Any:
        return self.drop(self.second(self.first(self.first(x))))


class Images(nn.Module):
    """Whole channels and single elements of feature maps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.channels, self.elements = nn.Conv2d(2, 4, 3), nn.Dropout2d(0.4), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.elements(self.channels(self.conv(x)))


class FlaxImages(nnx.Module):
    """The same, with the channels last."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), padding="VALID", rngs=rngs)
        self.channels = nnx.Dropout(0.4, broadcast_dims=(1, 2), rngs=rngs)
        self.elements = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.elements(self.channels(self.conv(x)))


# ------------------------------------------------------------------ nothing but drops, and faults in them


class Drops(nn.Module):
    """Two drops, each scaled by its place, so that the output shows both masks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Dropout(0.25), nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + 16 * self.b(x[..., :4]).sum(-1, keepdim=True)


class Unscaled(nnx.Dropout):
    def __call__(self, x: Any) -> Any:
        return jnp.where(jax.random.bernoulli(self.rngs(), 1 - self.rate, x.shape), x, 0)


class Inverse(nnx.Dropout):
    """Scales by what it should divide by."""

    def __call__(self, x: Any) -> Any:
        return jax.random.bernoulli(self.rngs(), 1 - self.rate, x.shape) * x * (1 - self.rate)


class Swapped(nnx.Dropout):
    def __call__(self, x: Any) -> Any:
        return jnp.where(jax.random.bernoulli(self.rngs(), 1 - self.rate, x.shape), 0, x / (1 - self.rate))


class OwnNumbers(nnx.Dropout):
    """Draws its mask otherwise."""

    def __call__(self, x: Any) -> Any:
        return jnp.where(jax.random.uniform(self.rngs(), x.shape) < 1 - self.rate, x / (1 - self.rate), 0)


class FlaxDrops(nnx.Module):
    """The twin of `Drops`, with a fault or without.

    Args:
        fault: a key of `FAULTS`, or "".
    """

    def __init__(self, fault: str = ""):
        def drop(rate: float, kind: Any = nnx.Dropout, **kwargs: Any) -> Any:
            return kind(rate, rngs=nnx.Rngs(3), **kwargs)

        self.fault = fault
        kinds = {"unscaled": Unscaled, "scaled by the inverse": Inverse, "keeps what is dropped": Swapped}
        broadcast = {"broadcast over the batch": (0,), "broadcast over two axes": (0, 1)}
        self.a = drop(0.3 if fault == "rate" else 0.25, kinds.get(fault, nnx.Dropout))
        if fault in broadcast:
            self.a = drop(0.25, broadcast_dims=broadcast[fault])
        self.b = drop(0.4, OwnNumbers if fault == "own numbers" else nnx.Dropout)
        if fault == "another place":
            self.c = drop(0.25)
        self.b.deterministic = fault == "missing"

    def __call__(self, x: Any) -> Any:
        first = self.c if self.fault == "another place" else self.a
        y = first(x[..., :7] if self.fault == "another shape" else x)
        y = first(y) if self.fault == "twice" else y
        short = 16 * self.b(x[..., :4]).sum(-1, keepdims=True)
        return y + short


# What must be named for each fault.
FAULTS = {
    "broadcast over the batch": r"^.*: a: flax broadcasts one mask over axis 0: expected \(torch\) \(3, 5, 8\), actual "
    r"\(flax\) \(1, 5, 8\); set broadcast_dropout=False or broadcast_dims=\(\)",
    "broadcast over two axes": r"a: flax broadcasts one mask over axis 0, 1: .*\(1, 1, 8\)",
    "rate": r"^.*: a drops at another rate: expected \(torch\) 0.25, actual \(flax\) 0.3; set the same",
    "unscaled": r"^.*: a does not scale what it keeps: expected \(torch\) times 1.33333, actual \(flax\) times 1; divide",
    "scaled by the inverse": r"^.*: a scales what it keeps by another factor: expected \(torch\) times 1.3.* times 0.75",
    "keeps what is dropped": r"^.*: a drops what its mask keeps",
    "another place": r"^.*: dropout stands at another place: torch drops at a, flax at c, both in shape \(3, 5, 8\); move it",
    "another shape": r"^.*: a: the masks have other shapes: expected \(torch\) \(3, 5, 8\), actual \(flax\) \(3, 5, 7\);",
    "twice": r"^.*: dropout too often: flax drops at a once more often than torch \(shape \(3, 5, 8\)\); drop as often",
    "missing": r"^.*: dropout is missing: torch drops at b once more often than flax \(shape \(3, 5, 4\)\); drop there",
    "own numbers": r"^.*: dropout is missing: torch drops at b once .* by jax.random.bernoulli",
}
