"""Scaled dot-product attention of the third source document: True hides."""

from collections.abc import Callable

from flax import nnx
from jax import Array
from jaxtyping import Float, Shaped

from jax_impl.checks import InputError, check_attention_inputs, check_mask
from jax_impl.layers import Dropout
from jax_impl.operations import divide, hide, is_nonzero, matmul, rounded_sqrt, softmax


def scaled_dot_product_attention(
    Q: Float[Array, "nq hq lq d_k"],
    K: Float[Array, "nk hk lk d_k"],
    V: Float[Array, "nv hv lk d_v"],
    mask: Shaped[Array, "..."] | None = None,
    *,
    dropout: Callable[[Array], Array] | None = None,
) -> tuple[Float[Array, "no ho lq d_v"], Float[Array, "nw hw lq lk"]]:
    """Attend: `softmax(Q K^T / sqrt(d_k)) V`.

    Quirks of the document, kept: the square root is rounded to the dtype of Q before it
    divides; the mask says what to hide, not what to keep; a query from which every key is
    hidden gets NaN in its output, and so do the gradients of all values of its head, while
    its own gradient is 0.

    Args:
        Q: queries, `(n, h, lq, d_k)`.
        K: keys, `(n, h, lk, d_k)`.
        V: values, `(n, h, lk, d_v)`.
        mask: True, or any number but 0, hides; broadcasts to `(n, h, lq, lk)`.
        dropout: applied to the attention weights before they meet the values; not in the document.

    Returns:
        The output `(n, h, lq, d_v)` and the attention weights `(n, h, lq, lk)`, before any dropout.

    Raises:
        InputError: ranks, head widths, lengths, dtypes or devices do not fit each other, or
            the mask would enlarge the scores.

    Source:
        the third document; Vaswani et al. 2017, "Attention is all you need", equation 1.
    """
    check_attention_inputs("scaled_dot_product_attention", Q, K, V)
    scores = divide(matmul(Q, K.swapaxes(-2, -1)), rounded_sqrt(Q.shape[-1], Q))
    check_mask("scaled_dot_product_attention", mask, scores.shape, scores)
    if mask is not None:
        scores = hide(scores, is_nonzero(mask), -float("inf"))
    attention_weights = softmax(scores)
    output = matmul(attention_weights if dropout is None else dropout(attention_weights), V)
    return output, attention_weights


class ScaledDotProductAttention(nnx.Module):
    """`scaled_dot_product_attention` as a module without parameters, so that it has a path in a trace.

    Args:
        p_drop: probability that an attention weight is zeroed in train mode; not in the document.

    Raises:
        InputError: p_drop is not in [0, 1].
    """

    def __init__(self, p_drop: float = 0.0, *, rngs: nnx.Rngs | None = None):
        if p_drop and rngs is None:
            raise InputError(f"ScaledDotProductAttention: p_drop={p_drop} draws masks and needs rngs; pass rngs=nnx.Rngs(0)")
        self.dropout = Dropout(p_drop, rngs=rngs) if p_drop and rngs is not None else None

    def __call__(
        self,
        Q: Float[Array, "nq hq lq d_k"],
        K: Float[Array, "nk hk lk d_k"],
        V: Float[Array, "nv hv lk d_v"],
        mask: Shaped[Array, "..."] | None = None,
    ) -> tuple[Float[Array, "no ho lq d_v"], Float[Array, "nw hw lq lk"]]:
        """Call `scaled_dot_product_attention`; arguments, results and errors are its own."""
        return scaled_dot_product_attention(Q, K, V, mask, dropout=self.dropout)
