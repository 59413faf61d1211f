"""Multi-head attention of the first source document: 0 hides."""

import math

from jaxtyping import Float, Shaped
from torch import Tensor, nn

from torch_impl.checks import check_heads, check_mask, check_sequences
from torch_impl.layers import Linear
from torch_impl.operations import divide, hide, is_zero, matmul, softmax


class MultiHeadSelfAttentionCore(nn.Module):
    """The step between split and merged heads, as a module without parameters, so that it has a path in a trace."""

    def forward(
        self,
        queries: Float[Tensor, "n h lq d"],
        keys: Float[Tensor, "n h lk d"],
        values: Float[Tensor, "n h lk d"],
        mask: Shaped[Tensor, "..."] | None = None,
    ) -> tuple[Float[Tensor, "n h lq d"], Float[Tensor, "n h lq lk"]]:
        """Attend: `softmax(Q K^T / sqrt(d)) V`.

        Args:
            queries: `(n, h, lq, d)`.
            keys: `(n, h, lk, d)`.
            values: `(n, h, lk, d)`.
            mask: 0 hides; broadcasts to `(n, h, lq, lk)`.

        Returns:
            The output `(n, h, lq, d)` and the attention weights `(n, h, lq, lk)`.
        """
        scores = divide(matmul(queries, keys.transpose(-2, -1)), math.sqrt(queries.shape[-1]))
        if mask is not None:
            scores = hide(scores, is_zero(mask), -float("inf"))
        attention = softmax(scores)
        return matmul(attention, values), attention


class Multi_Head_Self_Attention(nn.Module):
    """Project to heads, attend, project back; no bias anywhere.

    Quirks of the document, kept: 0 hides; the scores are divided by `sqrt(d)` in full
    precision whatever their dtype; a query from which every key is hidden gets NaN, and so
    do the gradients of all values and of the weights `values` and `fc_out`, while its own
    gradient is 0; the attention weights are not returned. It is not confined to
    self-attention: queries, keys and values may differ.

    Parameters, in this order: queries, keys, values, fc_out, each `(embed_size -> embed_size)`.

    Args:
        embed_size: width E.
        heads: number of heads h; each has width d = E / h.

    Raises:
        InputError: a size is no positive whole number, or E is no multiple of h.

    Source:
        the first document.
    """

    def __init__(self, embed_size: int, heads: int):
        super().__init__()
        check_heads("Multi_Head_Self_Attention", embed_size, heads)
        self.embed_size = embed_size
        self.heads = heads
        self.head_dim = embed_size // heads
        self.queries = Linear(embed_size, embed_size, bias=False)
        self.keys = Linear(embed_size, embed_size, bias=False)
        self.values = Linear(embed_size, embed_size, bias=False)
        self.fc_out = Linear(embed_size, embed_size, bias=False)
        self.attention = MultiHeadSelfAttentionCore()

    def forward(
        self,
        queries: Float[Tensor, "n lq e"],
        keys: Float[Tensor, "n lk e"],
        values: Float[Tensor, "n lk e"],
        mask: Shaped[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "n lq e"]:
        """Attend from `queries` to `keys` and `values`.

        Args:
            queries: `(n, lq, embed_size)`.
            keys: `(n, lk, embed_size)`.
            values: `(n, lk, embed_size)`.
            mask: 0 hides; broadcasts to `(n, h, lq, lk)`.

        Returns:
            The output, `(n, lq, embed_size)`.

        Raises:
            InputError: rank, width, batch size, length, dtype or device does not fit, or the
                mask would enlarge the scores.
        """
        where = "Multi_Head_Self_Attention"
        check_sequences(where, self.embed_size, self.queries.weight, queries=queries, keys=keys, values=values)
        (n, lq, _), lk = queries.shape, keys.shape[1]
        check_mask(where, mask, (n, self.heads, lq, lk), queries)
        queries = self.queries(queries).reshape(n, lq, self.heads, self.head_dim).transpose(1, 2)
        keys = self.keys(keys).reshape(n, lk, self.heads, self.head_dim).transpose(1, 2)
        values = self.values(values).reshape(n, lk, self.heads, self.head_dim).transpose(1, 2)
        out, _ = self.attention(queries, keys, values, mask)
        # Copied first: with one-wide heads reshape would give a view, whose product has other last bits.
        return self.fc_out(out.transpose(1, 2).contiguous().reshape(n, lq, self.embed_size))
