"""Self-attention of the second source document: projections that are never used."""

import math

from flax import nnx
from jax import Array
from jaxtyping import Float, Shaped

from jax_impl.checks import check_heads, check_mask, check_sequences
from jax_impl.layers import Linear
from jax_impl.operations import divide, einsum, hide, is_zero, softmax


class SelfAttentionCore(nnx.Module):
    """The step between split and merged heads, as a module without parameters, so that it has a path in a trace."""

    def __call__(
        self,
        values: Float[Array, "n lk h d"],
        keys: Float[Array, "n lk h d"],
        queries: Float[Array, "n lq h d"],
        mask: Shaped[Array, "..."] | None = None,
    ) -> tuple[Float[Array, "n lq h d"], Float[Array, "n h lq lk"]]:
        """Attend: `softmax(Q K^T / sqrt(h d)) V`, hiding before the division.

        Args:
            values: `(n, lk, h, d)`.
            keys: `(n, lk, h, d)`.
            queries: `(n, lq, h, d)`.
            mask: 0 hides; broadcasts to `(n, h, lq, lk)`.

        Returns:
            The output `(n, lq, h, d)` and the attention weights `(n, h, lq, lk)`.

        Raises:
            InputError: a mask is given in float16, which cannot hold -1e20.
        """
        energy = einsum("nqhd,nkhd->nhqk", queries, keys)
        if mask is not None:
            energy = hide(energy, is_zero(mask), -1e20)
        attention = softmax(divide(energy, math.sqrt(queries.shape[-2] * queries.shape[-1])))
        return einsum("nhqk,nkhd->nqhd", attention, values), attention


class SelfAttention(nnx.Module):
    """Split the raw input into heads, attend, project the result.

    Quirks of the document, kept: the arguments come as values, keys, query; the projections
    values, keys and queries exist and are saved, but no output depends on them, so that
    they get no gradient; scores are divided by `sqrt(embed_size)`, not by the root of the head
    width; hidden scores become -1e20 before that division, so that a query from which every
    key is hidden gets the uniform average of the values; float16 cannot hold -1e20, and a
    mask in float16 is refused; the attention weights are not returned.

    Parameters, in this order: values, keys, queries `(head_dim -> embed_size)` without bias,
    fc_out `(embed_size -> embed_size)` with bias.

    Args:
        embed_size: width E.
        heads: number of heads h; each has width d = E / h.

    Raises:
        InputError: a size is no positive whole number, or E is no multiple of h.

    Source:
        the second document.
    """

    def __init__(self, embed_size: int, heads: int, *, rngs: nnx.Rngs):
        check_heads("SelfAttention", embed_size, heads)
        self.embed_size = embed_size
        self.heads = heads
        self.head_dim = embed_size // heads
        self.values = Linear(self.head_dim, embed_size, bias=False, rngs=rngs)
        self.keys = Linear(self.head_dim, embed_size, bias=False, rngs=rngs)
        self.queries = Linear(self.head_dim, embed_size, bias=False, rngs=rngs)
        self.fc_out = Linear(embed_size, embed_size, rngs=rngs)
        self.attention = SelfAttentionCore()

    def __call__(
        self,
        values: Float[Array, "n lk e"],
        keys: Float[Array, "n lk e"],
        query: Float[Array, "n lq e"],
        mask: Shaped[Array, "..."] | None = None,
    ) -> Float[Array, "n lq e"]:
        """Attend from `query` to `keys` and `values`.

        Args:
            values: `(n, lk, embed_size)`.
            keys: `(n, lk, embed_size)`.
            query: `(n, lq, embed_size)`.
            mask: 0 hides; broadcasts to `(n, h, lq, lk)`.

        Returns:
            The output, `(n, lq, embed_size)`.

        Raises:
            InputError: rank, width, batch size, length, dtype or device does not fit, the mask
                would enlarge the scores, or a mask is given in float16.
        """
        check_sequences("SelfAttention", self.embed_size, self.fc_out.kernel[...], query=query, keys=keys, values=values)
        (n, lq, _), lk = query.shape, keys.shape[1]
        check_mask("SelfAttention", mask, (n, self.heads, lq, lk), query)
        values = values.reshape(n, lk, self.heads, self.head_dim)
        keys = keys.reshape(n, lk, self.heads, self.head_dim)
        queries = query.reshape(n, lq, self.heads, self.head_dim)
        out, _ = self.attention(values, keys, queries, mask)
        return self.fc_out(out.reshape(n, lq, self.embed_size))
