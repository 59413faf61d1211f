"""The encoder of the Transformer of 2017, from the third document's parts."""

from flax import nnx
from jax import Array
from jaxtyping import Float, Shaped

from jax_impl.config import TransformerConfig, make_attention, make_feed_forward, make_final_norm, make_norm
from jax_impl.layers import Dropout


class EncoderLayer(nnx.Module):
    """Self-attention and a feed-forward network, each with dropout, a residual and a normalisation.

    Post-norm, as in the paper: `norm(x + f(x))`; pre-norm by option: `x + f(norm(x))`. The feed-forward
    network brings its last dropout with it.

    Parameters, in this order: self_attention, feed_forward, norm1, norm2.

    Args:
        config: sizes and options.

    Source:
        Vaswani et al. 2017, section 3.1.
    """

    def __init__(self, config: TransformerConfig = TransformerConfig(), *, rngs: nnx.Rngs):
        self.norm_first = config.norm_first
        self.self_attention = make_attention(config, rotary=True, rngs=rngs)
        self.feed_forward = make_feed_forward(config, rngs=rngs)
        self.norm1 = make_norm(config, rngs=rngs)
        self.norm2 = make_norm(config, rngs=rngs)
        self.dropout = Dropout(config.p_drop, rngs=rngs)

    def __call__(self, x: Float[Array, "n l e"], mask: Shaped[Array, "..."] | None = None) -> Float[Array, "n l e"]:
        """Apply the layer.

        Args:
            x: `(n, l, d_model)`.
            mask: True hides; broadcasts to `(n, h, l, l)`.

        Returns:
            The same shape.
        """
        normed = self.norm1(x) if self.norm_first else x
        attended, _ = self.self_attention(normed, normed, normed, mask)
        x = x + self.dropout(attended)
        x = x if self.norm_first else self.norm1(x)
        x = x + self.feed_forward(self.norm2(x) if self.norm_first else x)
        return x if self.norm_first else self.norm2(x)


class Encoder(nnx.Module):
    """A stack of encoder layers, and a normalisation behind the last where the options ask for one.

    Parameters, in this order: layers, norm.

    Args:
        config: sizes and options.

    Source:
        Vaswani et al. 2017, section 3.1.
    """

    def __init__(self, config: TransformerConfig = TransformerConfig(), *, rngs: nnx.Rngs):
        self.layers = nnx.List([EncoderLayer(config, rngs=rngs) for _ in range(config.n_layers)])
        self.norm = make_final_norm(config, rngs=rngs)

    def __call__(self, x: Float[Array, "n l e"], mask: Shaped[Array, "..."] | None = None) -> Float[Array, "n l e"]:
        """Apply all layers.

        Args:
            x: `(n, l, d_model)`.
            mask: True hides; broadcasts to `(n, h, l, l)`.

        Returns:
            The same shape.
        """
        for layer in self.layers:
            x = layer(x, mask)
        return x if self.norm is None else self.norm(x)
