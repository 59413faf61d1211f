"""Multi-head attention of the third source document."""

from jaxtyping import Float, Shaped
from torch import Tensor, nn

from torch_impl.checks import InputError, check_mask, check_sequences, check_sizes
from torch_impl.layers import Linear
from torch_impl.scaled_dot_product_attention import ScaledDotProductAttention


class MultiHeadAttention(nn.Module):
    """Project to heads, attend with `scaled_dot_product_attention`, project back.

    Quirks of the document, kept: True hides; a query from which every key is hidden gets
    NaN; the attention weights are returned for each head, beside the output.
    The document folds a key batch of another size into the length; here that is refused.

    Parameters, in this order, each with its bias beside it where it has one: W_q and W_k
    `(d_model -> d_k * n_heads)`, W_v `(d_model -> d_v * n_heads)`, W_o `(d_v * n_heads -> d_model)`.

    Args:
        d_model: width of input and output.
        n_heads: number of heads.
        d_q: width of a query head; must equal d_k.
        d_k: width of a key head.
        d_v: width of a value head; may differ.
        bias: whether W_q, W_k and W_v have a bias.
        output_bias: whether W_o has one; None does as `bias` says.

    Raises:
        InputError: a size is no positive whole number, or d_q differs from d_k.

    Source:
        the third document; Vaswani et al. 2017, section 3.2.2.
    """

    def __init__(
        self,
        d_model: int = 512,
        n_heads: int = 8,
        d_q: int = 64,
        d_k: int = 64,
        d_v: int = 64,
        *,
        bias: bool = False,
        output_bias: bool | None = None,
    ):
        super().__init__()
        check_sizes("MultiHeadAttention", d_model=d_model, n_heads=n_heads, d_q=d_q, d_k=d_k, d_v=d_v)
        if d_q != d_k:
            raise InputError(f"MultiHeadAttention: d_q must equal d_k, got d_q={d_q}, d_k={d_k}; set both")
        self.d_model = d_model
        self.n_heads = n_heads
        self.d_k = d_k
        self.d_v = d_v
        self.W_q = Linear(d_model, d_q * n_heads, bias=bias)
        self.W_k = Linear(d_model, d_k * n_heads, bias=bias)
        self.W_v = Linear(d_model, d_v * n_heads, bias=bias)
        self.W_o = Linear(d_v * n_heads, d_model, bias=bias if output_bias is None else output_bias)
        self.attention = ScaledDotProductAttention()

    def forward(
        self,
        query: Float[Tensor, "n lq e"],
        key: Float[Tensor, "n lk e"],
        value: Float[Tensor, "n lk e"],
        mask: Shaped[Tensor, "..."] | None = None,
    ) -> tuple[Float[Tensor, "n lq e"], Float[Tensor, "n h lq lk"]]:
        """Attend from `query` to `key` and `value`.

        Args:
            query: `(n, lq, d_model)`.
            key: `(n, lk, d_model)`.
            value: `(n, lk, d_model)`.
            mask: True, or any number but 0, hides; broadcasts to `(n, h, lq, lk)`.

        Returns:
            The output `(n, lq, d_model)` and the attention weights `(n, h, lq, lk)`.

        Raises:
            InputError: rank, width, batch size, length, dtype or device does not fit, or the
                mask would enlarge the scores.
        """
        check_sequences("MultiHeadAttention", self.d_model, self.W_q.weight, query=query, key=key, value=value)
        (n, lq, _), lk = query.shape, key.shape[1]
        check_mask("MultiHeadAttention", mask, (n, self.n_heads, lq, lk), query)
        Q = self.W_q(query).reshape(n, lq, self.n_heads, self.d_k).transpose(1, 2)
        K = self.W_k(key).reshape(n, lk, self.n_heads, self.d_k).transpose(1, 2)
        V = self.W_v(value).reshape(n, lk, self.n_heads, self.d_v).transpose(1, 2)
        output, attention_weights = self.attention(Q, K, V, mask)
        # Copied first: with one-wide heads reshape would give a view, whose product has other last bits.
        output = output.transpose(1, 2).contiguous().reshape(n, lq, self.n_heads * self.d_v)
        return self.W_o(output), attention_weights
