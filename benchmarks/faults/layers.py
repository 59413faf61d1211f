"""Flax layers as people write them in ports, each with the places at which they go wrong."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.faults.planting import Plan


def layer_norm(plan: Plan, place: str, width: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Flax's own layer, whose defaults are not torch's."""
    return nnx.LayerNorm(
        width,
        epsilon=1e-6 if plan(place, "epsilon") else 1e-5,
        use_fast_variance=plan(place, "fast variance"),
        rngs=rngs,
    )


class HandNorm(nnx.Module):
    """A layer norm written by hand: nothing but its numbers tells what it computes."""

    def __init__(self, plan: Plan, place: str, width: int):
        self.weight, self.bias = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width))
        self.eps = 1e-12 if plan(place, "epsilon by hand") else 1e-5
        self.ddof = int(plan(place, "unbiased variance"))
        self.inside = not plan(place, "epsilon outside the root")
        self.biased = not plan(place, "bias missing")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis."""
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True, ddof=self.ddof)
        root = jnp.sqrt(variance + self.eps) if self.inside else jnp.sqrt(variance) + self.eps * 10
        y = (x - mean) / root * self.weight[...]
        return y + self.bias[...] if self.biased else y


class RMSNorm(nnx.Module):
    """A root mean square norm written by hand, as in ports of LLaMA."""

    def __init__(self, plan: Plan, place: str, width: int):
        self.weight = nnx.Param(jnp.ones(width))
        self.eps = 1e-5 if plan(place, "epsilon by hand") else 1e-3
        self.centred = plan(place, "mean subtracted")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis."""
        x = x - x.mean(-1, keepdims=True) if self.centred else x
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.weight[...]


def activation(plan: Plan, place: str, right: str) -> Callable[[jax.Array], jax.Array]:
    """An activation, or one that is taken for it."""
    known: dict[str, Callable[[jax.Array], jax.Array]] = {
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "tanh gelu": lambda x: jax.nn.gelu(x, approximate=True),
        "quick gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
        "relu": jax.nn.relu,
        "silu": jax.nn.silu,
        "leaky relu 0.01": lambda x: jax.nn.leaky_relu(x, 0.01),
        "leaky relu 0.2": lambda x: jax.nn.leaky_relu(x, 0.2),
        "tanh": jnp.tanh,
    }
    likely = {
        "gelu": ("tanh gelu", "quick gelu", "relu"),
        "relu": ("gelu", "silu"),
        "silu": ("gelu", "relu"),
        "leaky relu 0.2": ("leaky relu 0.01", "relu"),
        "tanh gelu": ("gelu",),
        "tanh": ("relu",),
    }
    wrong = next((other for other in likely[right] if plan(place, f"activation {other}")), right)
    return known[wrong]


class Function(nnx.Module):
    """A function without parameters as a module, so that it has the path of its twin in torch."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, *args: Any) -> Any:
        """Apply it."""
        return self.function(*args)


class Attend(nnx.Module):
    """Scores, mask, softmax, weighted sum: `(n, h, l, d)`; the mask says what may be seen.

    Faults of a mask are asked for only where the model is given one: without it they change nothing.
    """

    def __init__(self, plan: Plan, place: str, *, causal: bool = False, masked: bool = False):
        self.wrong, self.causal = frozenset(kind for kind in self.kinds(causal, masked) if plan(place, kind)), causal

    @staticmethod
    def kinds(causal: bool, masked: bool) -> list[str]:
        """What goes wrong here."""
        every = ["scale missing", "scale of the whole width", "scale squared", "softmax over queries"]
        every += ["mask inverted", "mask added as 0 and 1", "mask not applied"] if masked else []
        every += ["bfloat16 softmax", "values and keys swapped"]
        return every + (["causal mask shifted", "causal mask missing"] if causal else [])

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Attend."""
        wrong, d = self.wrong, q.shape[-1]
        k, v = (v, k) if "values and keys swapped" in wrong else (k, v)
        scale = (
            math.sqrt(d * q.shape[1])
            if "scale of the whole width" in wrong
            else d
            if "scale squared" in wrong
            else math.sqrt(d)
        )
        scores = q @ k.swapaxes(-2, -1) / (1.0 if "scale missing" in wrong else scale)
        if self.causal and "causal mask missing" not in wrong:
            shift = 1 if "causal mask shifted" in wrong else 0
            seen = jnp.tril(jnp.ones((q.shape[2], k.shape[2]), bool), shift)
            scores = jnp.where(seen, scores, -jnp.inf)
        if mask is not None and "mask not applied" not in wrong:
            seen = ~mask if "mask inverted" in wrong else mask
            scores = (
                scores + seen.astype(scores.dtype) if "mask added as 0 and 1" in wrong else jnp.where(seen, scores, -jnp.inf)
            )
        if "bfloat16 softmax" in wrong:
            scores = scores.astype(jnp.bfloat16).astype(scores.dtype)
        return jax.nn.softmax(scores, axis=-2 if "softmax over queries" in wrong else -1) @ v


class Attention(nnx.Module):
    """Self-attention with four projections, as in BERT and GPT."""

    def __init__(self, plan: Plan, width: int, heads: int, rngs: nnx.Rngs, *, causal: bool = False, masked: bool = False):
        self.heads = heads
        self.query, self.key, self.value, self.out = (nnx.Linear(width, width, rngs=rngs) for _ in range(4))
        self.attend = Attend(plan, "attend", causal=causal, masked=masked)
        self.split_wrong, self.merge_wrong = (
            plan("", "heads split without a transpose"),
            plan("", "heads merged without a transpose"),
        )
        self.swapped = plan("", "query and key swapped")
        self.no_output = plan("", "output projection left out")

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Attend among the tokens of `x`, `(n, l, width)`."""
        n, length, width = x.shape

        def split(y: jax.Array) -> jax.Array:
            if self.split_wrong:
                return y.reshape(n, self.heads, length, -1)
            return y.reshape(n, length, self.heads, -1).swapaxes(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        q, k = (k, q) if self.swapped else (q, k)
        y = self.attend(q, k, v, mask)
        y = y if self.merge_wrong else y.swapaxes(1, 2)
        y = y.reshape(n, length, width)
        return y if self.no_output else self.out(y)


class MLP(nnx.Module):
    """Two projections and an activation."""

    def __init__(self, plan: Plan, width: int, inner: int, rngs: nnx.Rngs, act: str = "gelu"):
        self.fc1, self.fc2 = nnx.Linear(width, inner, rngs=rngs), nnx.Linear(inner, width, rngs=rngs)
        self.act = Function(activation(plan, "act", act))
        self.early = plan("", "activation after the second projection")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply it to each token."""
        if self.early:
            return self.act(self.fc2(self.fc1(x)))
        return self.fc2(self.act(self.fc1(x)))
