"""all-MiniLM-L6-v2 in Flax Linen, written with `@compact`."""

import jax
import jax.numpy as jnp
from flax import linen as nn

WIDTH, HEADS, INNER, LAYERS, VOCABULARY, LONGEST, EPS = 384, 12, 1536, 6, 30522, 512, 1e-12

RENAME = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "kinds",
    "embeddings.LayerNorm": "norm",
    "encoder.layer.{i}.attention.self.query": "layer_{i}.query",
    "encoder.layer.{i}.attention.self.key": "layer_{i}.key",
    "encoder.layer.{i}.attention.self.value": "layer_{i}.value",
    "encoder.layer.{i}.attention.output.dense": "layer_{i}.mix",
    "encoder.layer.{i}.attention.output.LayerNorm": "layer_{i}.mix_norm",
    "encoder.layer.{i}.intermediate.dense": "layer_{i}.widen",
    "encoder.layer.{i}.output.dense": "layer_{i}.narrow",
    "encoder.layer.{i}.output.LayerNorm": "layer_{i}.norm",
}


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
