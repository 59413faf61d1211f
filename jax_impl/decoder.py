"""The decoder of the Transformer of 2017, from the third document's parts, whole or token by token."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

from jax_impl.config import TransformerConfig, make_attention, make_feed_forward, make_final_norm, make_norm
from jax_impl.layers import Dropout


class KeyValueCache(NamedTuple):
    """The projected keys and values of one decoder layer.

    Attributes:
        keys: of the tokens so far, `(n, n_kv_heads, max_new, d_k)`; beyond them zeros.
        values: likewise, `(n, n_kv_heads, max_new, d_v)`.
        memory_keys: of the encoder's output, `(n, n_kv_heads, ls, d_k)`.
        memory_values: likewise, `(n, n_kv_heads, ls, d_v)`.
    """

    keys: Float[Array, "n g lt d_k"]
    values: Float[Array, "n g lt d_v"]
    memory_keys: Float[Array, "n g ls d_k"]
    memory_values: Float[Array, "n g ls d_v"]


class DecoderLayer(nnx.Module):
    """Self-attention, attention to the encoder's output, and a feed-forward network.

    Each has dropout, a residual and a normalisation, as in `EncoderLayer`.

    Parameters, in this order: self_attention, cross_attention, feed_forward, norm1, norm2, norm3.

    Args:
        config: sizes and options.

    Source:
        Vaswani et al. 2017, section 3.1.
    """

    def __init__(self, config: TransformerConfig = TransformerConfig(), *, rngs: nnx.Rngs):
        self.norm_first = config.norm_first
        self.self_attention = make_attention(config, rotary=True, rngs=rngs)
        self.cross_attention = make_attention(config, rotary=False, rngs=rngs)
        self.feed_forward = make_feed_forward(config, rngs=rngs)
        self.norm1 = make_norm(config, rngs=rngs)
        self.norm2 = make_norm(config, rngs=rngs)
        self.norm3 = make_norm(config, rngs=rngs)
        self.dropout1 = Dropout(config.p_drop, rngs=rngs)
        self.dropout2 = Dropout(config.p_drop, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "n lt e"],
        memory: Float[Array, "n ls e"],
        mask: Shaped[Array, "..."] | None = None,
        memory_mask: Shaped[Array, "..."] | None = None,
    ) -> Float[Array, "n lt e"]:
        """Apply the layer.

        Args:
            x: `(n, lt, d_model)`.
            memory: the encoder's output, `(n, ls, d_model)`.
            mask: True hides; broadcasts to `(n, h, lt, lt)`.
            memory_mask: True hides; broadcasts to `(n, h, lt, ls)`.

        Returns:
            The shape of `x`.
        """
        normed = self.norm1(x) if self.norm_first else x
        attended, _ = self.self_attention(normed, normed, normed, mask)
        x = self.after_self_attention(x, attended)
        attended, _ = self.cross_attention(self.norm2(x) if self.norm_first else x, memory, memory, memory_mask)
        return self.after_cross_attention(x, attended)

    def start(self, memory: Float[Array, "n ls e"], max_new: int) -> KeyValueCache:
        """An empty cache for decoding token by token.

        Args:
            memory: the encoder's output, `(n, ls, d_model)`.
            max_new: number of tokens that it takes.

        Returns:
            The cache.
        """
        memory_keys, memory_values = self.cross_attention.keys_values(memory, memory)
        n, heads = memory_keys.shape[:2]
        keys = jnp.zeros((n, heads, max_new, memory_keys.shape[-1]), memory_keys.dtype)
        values = jnp.zeros((n, heads, max_new, memory_values.shape[-1]), memory_values.dtype)
        return KeyValueCache(keys, values, memory_keys, memory_values)

    def step(
        self,
        x: Float[Array, "n 1 e"],
        cache: KeyValueCache,
        position: int | Int[Array, ""],
        mask: Shaped[Array, "..."],
        memory_mask: Shaped[Array, "..."] | None = None,
    ) -> tuple[Float[Array, "n 1 e"], KeyValueCache]:
        """Apply the layer to one more token.

        Args:
            x: the token, `(n, 1, d_model)`.
            cache: of the tokens before it.
            position: of the token.
            mask: True hides; broadcasts to `(n, h, 1, max_new)`; must hide what comes after the token.
            memory_mask: True hides; broadcasts to `(n, h, 1, ls)`.

        Returns:
            The layer's output, `(n, 1, d_model)`, and the cache with the token.
        """
        normed = self.norm1(x) if self.norm_first else x
        query = self.self_attention.queries(normed, position)
        key, value = self.self_attention.keys_values(normed, normed, position)
        keys, values = put(cache.keys, key, position), put(cache.values, value, position)
        attended, _ = self.self_attention.attend(query, keys, values, mask)
        x = self.after_self_attention(x, attended)
        query = self.cross_attention.queries(self.norm2(x) if self.norm_first else x)
        attended, _ = self.cross_attention.attend(query, cache.memory_keys, cache.memory_values, memory_mask)
        return self.after_cross_attention(x, attended), cache._replace(keys=keys, values=values)

    def after_self_attention(self, x: Float[Array, "n l e"], attended: Float[Array, "n l e"]) -> Float[Array, "n l e"]:
        """What follows self-attention: dropout, residual, normalisation.

        Args:
            x: the layer's input.
            attended: the attention's output.

        Returns:
            The input of the attention to the encoder's output, not yet normalised in pre-norm.
        """
        x = x + self.dropout1(attended)
        return x if self.norm_first else self.norm1(x)

    def after_cross_attention(self, x: Float[Array, "n l e"], attended: Float[Array, "n l e"]) -> Float[Array, "n l e"]:
        """What follows the attention to the encoder's output: dropout, residual, normalisation, feed-forward network.

        Args:
            x: what `after_self_attention` gave.
            attended: the attention's output.

        Returns:
            The layer's output.
        """
        x = x + self.dropout2(attended)
        x = x if self.norm_first else self.norm2(x)
        x = x + self.feed_forward(self.norm3(x) if self.norm_first else x)
        return x if self.norm_first else self.norm3(x)


class Decoder(nnx.Module):
    """A stack of decoder layers, and a normalisation behind the last where the options ask for one.

    Parameters, in this order: layers, norm.

    Args:
        config: sizes and options.

    Source:
        Vaswani et al. 2017, section 3.1.
    """

    def __init__(self, config: TransformerConfig = TransformerConfig(), *, rngs: nnx.Rngs):
        self.layers = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(config.n_layers)])
        self.norm = make_final_norm(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "n lt e"],
        memory: Float[Array, "n ls e"],
        mask: Shaped[Array, "..."] | None = None,
        memory_mask: Shaped[Array, "..."] | None = None,
    ) -> Float[Array, "n lt e"]:
        """Apply all layers.

        Args:
            x: `(n, lt, d_model)`.
            memory: the encoder's output, `(n, ls, d_model)`.
            mask: True hides; broadcasts to `(n, h, lt, lt)`.
            memory_mask: True hides; broadcasts to `(n, h, lt, ls)`.

        Returns:
            The shape of `x`.
        """
        for layer in self.layers:
            x = layer(x, memory, mask, memory_mask)
        return x if self.norm is None else self.norm(x)

    def start(self, memory: Float[Array, "n ls e"], max_new: int) -> list[KeyValueCache]:
        """Empty caches for decoding token by token.

        Args:
            memory: the encoder's output, `(n, ls, d_model)`.
            max_new: number of tokens that they take.

        Returns:
            One cache for each layer.
        """
        return [layer.start(memory, max_new) for layer in self.layers]

    def step(
        self,
        x: Float[Array, "n 1 e"],
        caches: list[KeyValueCache],
        position: int | Int[Array, ""],
        mask: Shaped[Array, "..."],
        memory_mask: Shaped[Array, "..."] | None = None,
    ) -> tuple[Float[Array, "n 1 e"], list[KeyValueCache]]:
        """Apply all layers to one more token.

        Args:
            x: the token, `(n, 1, d_model)`.
            caches: one for each layer.
            position: of the token.
            mask: True hides; broadcasts to `(n, h, 1, max_new)`; must hide what comes after the token.
            memory_mask: True hides; broadcasts to `(n, h, 1, ls)`.

        Returns:
            The output, `(n, 1, d_model)`, and the caches with the token.
        """
        filled = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, extended = layer.step(x, cache, position, mask, memory_mask)
            filled.append(extended)
        return x if self.norm is None else self.norm(x), filled


def put(
    cache: Float[Array, "n g l d"], new: Float[Array, "n g 1 d"], position: int | Int[Array, ""]
) -> Float[Array, "n g l d"]:
    """A cache with one more token.

    Args:
        cache: `(n, g, max_new, d)`; left as it is.
        new: `(n, g, 1, d)`.
        position: where it goes.

    Returns:
        The new cache.
    """
    return lax.dynamic_update_slice_in_dim(cache, new, position, axis=2)
