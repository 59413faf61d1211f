"""The reference's own modules against natural ports of them, as a reader of the documents writes them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_impl
import torch_impl
from benchmarks.faults.layers import Function, activation
from benchmarks.faults.planting import Model, Plan

E, H, D = 24, 4, 6
CONFIG, TORCH_CONFIG = (wing.TransformerConfig(E, H, 1, 40, 9, p_drop=0.0, bias=True) for wing in (jax_impl, torch_impl))


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


class Transformer(jax_impl.Transformer):
    """The Flax wing's own model with a fault in its code or in the code of a part."""

    def __init__(self, plan: Plan):
        super().__init__(11, 13, CONFIG, rngs=nnx.Rngs(0))
        self.unscaled, self.from_one = plan("", "embedding not scaled"), plan("", "causal mask shifted")
        self.seen, self.open = plan("", "padding mask of the source not passed on"), plan("", "causal mask missing")
        self.last = int(plan("", "positions from one"))
        encoder, decoder = self.encoder.layers[0], self.decoder.layers[0]
        if plan("encoder.layers.0.norm1", "epsilon"):
            encoder.norm1 = jax_impl.LayerNorm(E, 1e-3, rngs=nnx.Rngs(0))
        if plan("decoder.layers.0.norm3", "epsilon"):
            decoder.norm3 = jax_impl.LayerNorm(E, 1e-6, rngs=nnx.Rngs(0))
        if plan("encoder.layers.0.feed_forward.model.1", "activation gelu"):
            encoder.feed_forward.model.layers[1] = jax_impl.GELU()
        encoder.norm_first = plan("encoder.layers.0", "pre-norm for post-norm")
        decoder.norm_first = plan("decoder.layers.0", "pre-norm for post-norm")
        if plan("decoder.layers.0", "residual around the cross-attention missing"):
            decoder.__class__ = WithoutResidual
        if plan("decoder.layers.0.cross_attention", "heads merged without a transpose"):
            decoder.cross_attention.__class__ = Merged

    def encode(self, source: jax.Array) -> jax.Array:
        """Run the encoder."""
        embedded = self.source_dropout(self.embed(self.source_embedding, source))
        return self.encoder(
            embedded, jnp.zeros((source.shape[0], 1, 1, source.shape[1]), bool) if self.seen else source_mask(source)
        )

    def decode(self, target: jax.Array, memory: jax.Array, memory_mask: jax.Array | None = None) -> jax.Array:
        """Run the decoder and the projection."""
        length = target.shape[1]
        causal = jnp.arange(length)[None, :] > jnp.arange(length)[:, None] + int(self.from_one)
        mask = source_mask(target) if self.open else source_mask(target) | causal[None, None]
        embedded = self.target_dropout(self.embed(self.target_embedding, target))
        return self.scores(self.decoder(embedded, memory, mask, memory_mask))

    def embed(self, embedding: nnx.Module, tokens: jax.Array, offset: Any = 0) -> jax.Array:
        """Rows of an embedding with their positions."""
        embedded = embedding(tokens) * (1.0 if self.unscaled else math.sqrt(E))
        return self.positions(embedded, offset + self.last)


class WithoutResidual(jax_impl.DecoderLayer):
    """A decoder layer whose cross-attention replaces what it is added to."""

    def after_cross_attention(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """What follows the cross-attention."""
        x = self.norm2(self.dropout2(attended))
        return self.norm3(x + self.feed_forward(x))


class Merged(jax_impl.MultiHeadAttention):
    """An attention whose heads are merged by a bare reshape."""

    def attend(self, Q: jax.Array, K: jax.Array, V: jax.Array, mask: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Attend between projected heads."""
        output, weights = self.attention(Q, K, V, mask)
        return self.W_o(output.reshape(Q.shape[0], Q.shape[2], E)), weights


def source_mask(tokens: jax.Array) -> jax.Array:
    """True where there is padding, `(n, 1, 1, l)`."""
    return (tokens == 0)[:, None, None, :]


def sentences(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Ids of two lengths with padding at the end; the first token of none is padding."""
    source, target = rng.integers(1, 11, (3, 6)), rng.integers(1, 13, (3, 5))
    source[1, 4:], source[2, 3:], target[2, 3:] = 0, 0, 0
    return source.astype(np.int32), target.astype(np.int32)


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
    Model("transformer", lambda: torch_impl.Transformer(11, 13, TORCH_CONFIG), Transformer, sentences),
    Model("third document", lambda: torch_impl.MultiHeadAttention(E, H, D, D, D, bias=True), MultiHeadAttention, hidden),
    Model("second document", lambda: torch_impl.SelfAttention(E, H), SelfAttention, shown),
    Model(
        "feed-forward",
        lambda: torch_impl.FeedForwardNetwork(E, 40),
        FeedForward,
        lambda rng: (rng.normal(size=(3, 7, E)).astype(np.float32),),
    ),
)
