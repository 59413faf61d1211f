"""all-MiniLM-L6-v2 in Flax Linen, written with `@compact`."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from in_nnx import EPS, HEADS, INNER, LAYERS, LONGEST, VOCABULARY, WIDTH
from in_nnx import RENAME as NNX_NAMES

# `@compact` has no lists: a layer carries its number in its name.
RENAME = {theirs: mine.replace("layers.{i}", "layer_{i}") for theirs, mine in NNX_NAMES.items()}


def norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=EPS, use_fast_variance=False, name=name)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, padding: jax.Array) -> jax.Array:
        q, k, v = (nn.Dense(WIDTH, name=name)(x).reshape(*x.shape[:2], HEADS, -1) for name in ("query", "key", "value"))
        mixed = jax.nn.dot_product_attention(q, k, v, mask=~padding[:, None, None, :])
        x = norm("mix_norm")(x + nn.Dense(WIDTH, name="mix")(mixed.reshape(x.shape)))
        inner = jax.nn.gelu(nn.Dense(INNER, name="widen")(x), approximate=False)
        return norm("norm")(x + nn.Dense(WIDTH, name="narrow")(inner))


class SentenceEncoder(nn.Module):
    """Token ids to sentence embeddings of length one."""

    @nn.compact
    def __call__(self, ids: jax.Array, padding: jax.Array) -> jax.Array:
        """Embeddings `(n, 384)` of ids `(n, length)`; `padding` of the same shape is True where there is no token."""
        x = nn.Embed(VOCABULARY, WIDTH, name="words")(ids)
        x += nn.Embed(2, WIDTH, name="kinds")(jnp.zeros_like(ids))
        x += nn.Embed(LONGEST, WIDTH, name="positions")(jnp.arange(ids.shape[1]))
        x = norm("norm")(x)
        for i in range(LAYERS):
            x = Layer(name=f"layer_{i}")(x, padding)
        kept = (~padding)[..., None].astype(x.dtype)
        mean = (x * kept).sum(1) / jnp.maximum(kept.sum(1), 1e-9)
        return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)
