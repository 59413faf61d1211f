"""Multi-head attention of the third source document."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int, Shaped

from jax_impl.checks import InputError, check_mask, check_sequences, check_sizes, raise_all, sharing_problems
from jax_impl.layers import Linear
from jax_impl.positions import RotaryPositions
from jax_impl.scaled_dot_product_attention import ScaledDotProductAttention


class MultiHeadAttention(nnx.Module):
    """Project to heads, attend with `scaled_dot_product_attention`, project back.

    Quirks of the document, kept: True hides; a query from which every key is hidden gets
    NaN; the attention weights are returned for each head, beside the output.
    The document folds a key batch of another size into the length; here that is refused.
    Not in the document: heads that share keys and values, dropout on the attention weights,
    rotary positions.

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
        n_kv_heads: number of key and value heads, each shared by n_heads / n_kv_heads neighbouring
            query heads; None is n_heads. W_k and W_v are that much narrower.
        p_drop: probability that an attention weight is zeroed in train mode.
        rotary: turns queries and keys by their positions; None does not.

    Raises:
        InputError: a size is no positive whole number, d_q differs from d_k, n_heads is no multiple of
            n_kv_heads, or p_drop is not in [0, 1].

    Source:
        the third document; Vaswani et al. 2017, section 3.2.2; Ainslie et al. 2023, "GQA".
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
        n_kv_heads: int | None = None,
        p_drop: float = 0.0,
        rotary: RotaryPositions | None = None,
        rngs: nnx.Rngs,
    ):
        given = {} if n_kv_heads is None else {"n_kv_heads": n_kv_heads}
        check_sizes("MultiHeadAttention", d_model=d_model, n_heads=n_heads, d_q=d_q, d_k=d_k, d_v=d_v, **given)
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        raise_all("MultiHeadAttention", sharing_problems(n_heads=n_heads, n_kv_heads=n_kv_heads))
        if d_q != d_k:
            raise InputError(f"MultiHeadAttention: d_q must equal d_k, got d_q={d_q}, d_k={d_k}; set both")
        self.d_model = d_model
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.d_k = d_k
        self.d_v = d_v
        self.W_q = Linear(d_model, d_q * n_heads, bias=bias, rngs=rngs)
        self.W_k = Linear(d_model, d_k * n_kv_heads, bias=bias, rngs=rngs)
        self.W_v = Linear(d_model, d_v * n_kv_heads, bias=bias, rngs=rngs)
        self.W_o = Linear(d_v * n_heads, d_model, bias=bias if output_bias is None else output_bias, rngs=rngs)
        self.attention = ScaledDotProductAttention(p_drop, rngs=rngs)
        self.rotary = rotary

    def __call__(
        self,
        query: Float[Array, "n lq e"],
        key: Float[Array, "n lk e"],
        value: Float[Array, "n lk e"],
        mask: Shaped[Array, "..."] | None = None,
        *,
        need_weights: bool = True,
    ) -> tuple[Float[Array, "n lq e"], Float[Array, "n h lq lk"] | None]:
        """Attend from `query` to `key` and `value`.

        Args:
            query: `(n, lq, d_model)`.
            key: `(n, lk, d_model)`.
            value: `(n, lk, d_model)`.
            mask: True, or any number but 0, hides; broadcasts to `(n, h, lq, lk)`.
            need_weights: whether the attention weights are returned; None comes in their place if not.

        Returns:
            The output `(n, lq, d_model)` and the attention weights `(n, h, lq, lk)`.

        Raises:
            InputError: rank, width, batch size, length, dtype or device does not fit, or the
                mask would enlarge the scores.
        """
        check_sequences("MultiHeadAttention", self.d_model, self.W_q.kernel[...], query=query, key=key, value=value)
        check_mask("MultiHeadAttention", mask, (query.shape[0], self.n_heads, query.shape[1], key.shape[1]), query)
        Q = self.queries(query)
        K, V = self.keys_values(key, value)
        output, attention_weights = self.attend(Q, K, V, mask)
        return output, attention_weights if need_weights else None

    def queries(self, query: Float[Array, "n lq e"], offset: int | Int[Array, ""] = 0) -> Float[Array, "n h lq d_k"]:
        """Project to the heads of queries.

        Args:
            query: `(n, lq, d_model)`.
            offset: position of the first query.

        Returns:
            The queries `(n, h, lq, d_k)`, turned by their positions if there are rotary ones.
        """
        n, lq, _ = query.shape
        Q = self.W_q(query).reshape(n, lq, self.n_heads, self.d_k).swapaxes(1, 2)
        return Q if self.rotary is None else self.rotary(Q, offset)

    def keys_values(
        self, key: Float[Array, "n lk e"], value: Float[Array, "n lk e"], offset: int | Int[Array, ""] = 0
    ) -> tuple[Float[Array, "n g lk d_k"], Float[Array, "n g lk d_v"]]:
        """Project to the heads of keys and values.

        Args:
            key: `(n, lk, d_model)`.
            value: `(n, lk, d_model)`.
            offset: position of the first key.

        Returns:
            The keys `(n, n_kv_heads, lk, d_k)`, turned by their positions if there are rotary ones,
            and the values `(n, n_kv_heads, lk, d_v)`.
        """
        n, lk, _ = key.shape
        K = self.W_k(key).reshape(n, lk, self.n_kv_heads, self.d_k).swapaxes(1, 2)
        V = self.W_v(value).reshape(n, lk, self.n_kv_heads, self.d_v).swapaxes(1, 2)
        return K if self.rotary is None else self.rotary(K, offset), V

    def attend(
        self,
        Q: Float[Array, "n h lq d_k"],
        K: Float[Array, "n g lk d_k"],
        V: Float[Array, "n g lk d_v"],
        mask: Shaped[Array, "..."] | None = None,
    ) -> tuple[Float[Array, "n lq e"], Float[Array, "n h lq lk"]]:
        """Attend between projected heads, and project back.

        Args:
            Q: what `queries` gave.
            K: the keys of `keys_values`.
            V: the values of `keys_values`.
            mask: True, or any number but 0, hides; broadcasts to `(n, h, lq, lk)`.

        Returns:
            The output `(n, lq, d_model)` and the attention weights `(n, h, lq, lk)`.
        """
        n, _, lq, _ = Q.shape
        shared = self.n_heads // self.n_kv_heads
        if shared > 1:
            K, V = jnp.repeat(K, shared, axis=1), jnp.repeat(V, shared, axis=1)
        output, attention_weights = self.attention(Q, K, V, mask)
        output = output.swapaxes(1, 2).reshape(n, lq, self.n_heads * self.d_v)
        return self.W_o(output), attention_weights
