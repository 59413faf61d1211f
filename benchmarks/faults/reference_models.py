"""The reference's own modules against natural ports of them, as a reader of the documents writes them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import torch_impl
from benchmarks.faults.layers import Function, activation
from benchmarks.faults.planting import Model, Plan

E, H, D = 24, 4, 6


def sequences(rng: np.random.Generator) -> list[np.ndarray]:
    """Queries of one length, keys and values of another."""
    return [rng.normal(size=(3, length, E)).astype(np.float32) for length in (5, 7, 7)]


class Core(nnx.Module):
    """The step between split and merged heads; `hidden` is True where a score is left out."""

    def __init__(self, plan: Plan, scale: float, fill: float):
        self.scale, self.fill = scale, fill
        self.mean = (plan("", "scale missing") and 1.0) or (plan("", "scale squared") and scale**2) or scale
        self.other = plan("", "scale of the other width")
        self.shown, self.after = plan("", "mask inverted"), plan("", "mask behind the softmax")
        self.axis = -2 if plan("", "softmax over queries") else -1

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, hidden: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Attend: `(n, h, l, d)`."""
        scores = q @ k.swapaxes(-2, -1)
        hidden = ~hidden if hidden is not None and self.shown else hidden
        if hidden is not None and not self.after:
            scores = jnp.where(hidden, self.fill, scores)
        scale = math.sqrt(E * D) / self.scale if self.other else self.mean
        weights = jax.nn.softmax(scores / scale, axis=self.axis)
        if hidden is not None and self.after:
            weights = jnp.where(hidden, 0.0, weights)
        return weights @ v, weights


class MultiHeadAttention(nnx.Module):
    """The port of the third document's attention."""

    def __init__(self, plan: Plan):
        rngs = nnx.Rngs(0)
        self.W_q, self.W_k, self.W_v, self.W_o = (nnx.Linear(E, E, rngs=rngs) for _ in range(4))
        self.attention = Core(plan.under("attention"), math.sqrt(D), -jnp.inf)
        self.bare, self.merged = plan("", "heads split without a transpose"), plan("", "heads merged without a transpose")
        self.other_input = plan("", "key given for value")

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Attend; True hides."""
        n, lq, _ = query.shape

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(n, H, -1, D) if self.bare else x.reshape(n, -1, H, D).swapaxes(1, 2)

        value = key if self.other_input else value
        output, weights = self.attention(split(self.W_q(query)), split(self.W_k(key)), split(self.W_v(value)), mask)
        output = output if self.merged else output.swapaxes(1, 2)
        return self.W_o(output.reshape(n, lq, E)), weights


class SelfAttention(nnx.Module):
    """The port of the second document's attention, whose projections are never used.

    It has no module for the step between the heads, so that faults in that stand in its own code.
    """

    def __init__(self, plan: Plan):
        rngs = nnx.Rngs(0)
        self.values, self.keys, self.queries = (nnx.Linear(D, E, use_bias=False, rngs=rngs) for _ in range(3))
        self.fc_out = nnx.Linear(E, E, rngs=rngs)
        self.scale = math.sqrt(D) if plan("", "scale of the head width") else math.sqrt(E)
        self.fill = -jnp.inf if plan("", "hidden rows become NaN") else -1e20
        self.order = plan("", "arguments in the usual order")
        self.shown = plan("", "mask inverted")

    def __call__(self, values: jax.Array, keys: jax.Array, query: jax.Array, mask: jax.Array) -> jax.Array:
        """Attend; 0 hides."""
        values, query = (query, values) if self.order else (values, query)
        q, k, v = (x.reshape(*x.shape[:2], H, D) for x in (query, keys, values))
        energy = jnp.einsum("nqhd,nkhd->nhqk", q, k)
        hidden = (mask != 0) if self.shown else (mask == 0)
        weights = jax.nn.softmax(jnp.where(hidden, self.fill, energy) / self.scale, axis=-1)
        return self.fc_out(jnp.einsum("nhqk,nkhd->nqhd", weights, v).reshape(*q.shape[:2], E))


class FeedForward(nnx.Module):
    """The port of the third document's network."""

    def __init__(self, plan: Plan):
        rngs = nnx.Rngs(0)
        self.model = nnx.Sequential(
            nnx.Linear(E, 40, rngs=rngs),
            Function(activation(plan, "model.1", "relu")),
            Function(lambda x: x),
            nnx.Linear(40, E, rngs=rngs),
            Function(lambda x: x),
        )
        self.residual = plan("", "residual added")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply it to each token."""
        return x + self.model(x) if self.residual else self.model(x)


def hidden(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Sequences, and a mask in which True hides; no row is hidden whole."""
    mask = rng.random((3, 1, 5, 7)) < 0.3
    mask[..., 0] = False
    return (*sequences(rng), mask)


def shown(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Sequences of one length, and a mask in which 0 hides; one row is hidden whole."""
    mask = (rng.random((3, 1, 5, 5)) < 0.7).astype(np.int32)
    mask[1, 0, 2] = 0
    return (*(rng.normal(size=(3, 5, E)).astype(np.float32) for _ in range(3)), mask)


MODELS = (
    Model("third document", lambda: torch_impl.MultiHeadAttention(E, H, D, D, D, bias=True), MultiHeadAttention, hidden),
    Model("second document", lambda: torch_impl.SelfAttention(E, H), SelfAttention, shown),
    Model(
        "feed-forward",
        lambda: torch_impl.FeedForwardNetwork(E, 40),
        FeedForward,
        lambda rng: (rng.normal(size=(3, 7, E)).astype(np.float32),),
    ),
)
