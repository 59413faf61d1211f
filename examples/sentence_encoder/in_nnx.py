"""all-MiniLM-L6-v2 in Flax NNX."""

import jax
import jax.numpy as jnp
from flax import nnx

# From config.json of the model.
WIDTH, HEADS, INNER, LAYERS, VOCABULARY, LONGEST, EPS = 384, 12, 1536, 6, 30522, 512, 1e-12

# What the checkpoint calls it: what it is called here.
RENAME = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "kinds",
    "embeddings.LayerNorm": "norm",
    "encoder.layer.{i}.attention.self.query": "layers.{i}.query",
    "encoder.layer.{i}.attention.self.key": "layers.{i}.key",
    "encoder.layer.{i}.attention.self.value": "layers.{i}.value",
    "encoder.layer.{i}.attention.output.dense": "layers.{i}.mix",
    "encoder.layer.{i}.attention.output.LayerNorm": "layers.{i}.mix_norm",
    "encoder.layer.{i}.intermediate.dense": "layers.{i}.widen",
    "encoder.layer.{i}.output.dense": "layers.{i}.narrow",
    "encoder.layer.{i}.output.LayerNorm": "layers.{i}.norm",
}


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        for name in ("query", "key", "value", "mix"):
            setattr(self, name, nnx.Linear(WIDTH, WIDTH, rngs=rngs))
        self.mix_norm = nnx.LayerNorm(WIDTH, epsilon=EPS, use_fast_variance=False, rngs=rngs)
        self.widen = nnx.Linear(WIDTH, INNER, rngs=rngs)
        self.narrow = nnx.Linear(INNER, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, epsilon=EPS, use_fast_variance=False, rngs=rngs)

    def __call__(self, x: jax.Array, padding: jax.Array) -> jax.Array:
        q, k, v = (f(x).reshape(*x.shape[:2], HEADS, -1) for f in (self.query, self.key, self.value))
        mixed = jax.nn.dot_product_attention(q, k, v, mask=~padding[:, None, None, :])
        x = self.mix_norm(x + self.mix(mixed.reshape(x.shape)))
        return self.norm(x + self.narrow(jax.nn.gelu(self.widen(x), approximate=False)))


class SentenceEncoder(nnx.Module):
    """Token ids to sentence embeddings of length one."""

    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LONGEST, WIDTH, rngs=rngs)
        self.kinds = nnx.Embed(2, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, epsilon=EPS, use_fast_variance=False, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, ids: jax.Array, padding: jax.Array) -> jax.Array:
        """Embeddings `(n, 384)` of ids `(n, length)`; `padding` of the same shape is True where there is no token."""
        x = self.words(ids) + self.kinds(jnp.zeros_like(ids)) + self.positions(jnp.arange(ids.shape[1]))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, padding)
        kept = (~padding)[..., None].astype(x.dtype)
        mean = (x * kept).sum(1) / jnp.maximum(kept.sum(1), 1e-9)
        return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)
