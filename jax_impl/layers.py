"""The leaf layers: torch's semantics, with errors that name the values.

A layer's parameters are `flax.nnx`'s; their initial distributions are `torch.nn`'s.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jax_impl.checks import check_choices, check_features, check_probability, check_sizes, check_tokens
from jax_impl.operations import matmul, wide_dtype, wide_matmul


class Linear(nnx.Linear):
    """Affine map of the last axis, `x W^T + b`.

    Initialised like `torch.nn.Linear`: weight and bias uniform within 1 / sqrt(in_features).
    In float16 and bfloat16 the products are summed in float32, the bias is added there,
    and the result is rounded once.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether b exists.

    Raises:
        InputError: a size is no positive whole number.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, rngs: nnx.Rngs):
        check_sizes("Linear", in_features=in_features, out_features=out_features)
        init = _uniform_within(1 / math.sqrt(in_features))
        super().__init__(in_features, out_features, use_bias=bias, kernel_init=init, bias_init=init, rngs=rngs)

    def __call__(self, input: Float[Array, "*n i"]) -> Float[Array, "*n o"]:
        """Map the last axis.

        Args:
            input: `(..., in_features)` in the dtype of the weights.

        Returns:
            `(..., out_features)`.

        Raises:
            InputError: width, dtype or device is not that of the weights.
        """
        check_features("Linear", input, self.in_features, self.kernel[...])
        output = wide_matmul(input, self.kernel[...])
        if self.bias is not None:
            # Added before the rounding: torch rounds once, and the bias gradient is then summed in float32.
            output += self.bias[...].astype(output.dtype)
        return output.astype(input.dtype)


class ReLU(nnx.Module):
    """`max(x, 0)`, with gradient 0 at 0; NaN stays NaN, and has gradient 1."""

    def __call__(self, input: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Clip at zero.

        Args:
            input: any shape.

        Returns:
            The same shape and dtype.
        """
        # jnp.maximum(x, 0) would have gradient 1/2 at 0, jax.nn.relu gradient 0 at NaN.
        return jnp.where(input <= 0, jnp.zeros_like(input), input)


class Dropout(nnx.Dropout):
    """Zero each element with probability p in train mode and scale the others by 1 / (1 - p).

    One draw for every element: no axis shares a mask. The input is multiplied by the mask,
    so NaN and infinity in a dropped place come out as NaN. In eval mode the input passes
    unchanged.

    Args:
        p: probability that an element is zeroed.

    Raises:
        InputError: p is not in [0, 1].
    """

    def __init__(self, p: float = 0.5, *, rngs: nnx.Rngs):
        check_probability("Dropout", p)
        super().__init__(p, rngs=rngs)

    def __call__(self, input: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Drop, in train mode.

        Args:
            input: any shape.

        Returns:
            The same shape and dtype.
        """
        if self.deterministic or self.rate == 0:
            return input
        if self.rate == 1:
            return input * jnp.zeros_like(input)
        kept = jax.random.bernoulli(self.rngs(), 1 - self.rate, input.shape)
        # torch divides in float32 at least and rounds the quotient to the input's dtype.
        wide = wide_dtype(input.dtype).type
        return input * (kept.astype(input.dtype) * (wide(1) / wide(1 - self.rate)).astype(input.dtype))


class GELU(nnx.Module):
    """`x Phi(x)` with the normal distribution function Phi, or its approximation by tanh.

    Args:
        approximate: "none" for Phi itself, "tanh" for the approximation.

    Raises:
        InputError: approximate is neither.

    Source:
        Hendrycks and Gimpel 2016, "Gaussian error linear units".
    """

    def __init__(self, approximate: str = "none"):
        check_choices("GELU", "approximate", approximate, ("none", "tanh"))
        self.approximate = approximate

    def __call__(self, input: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Weigh each element.

        Args:
            input: any shape; float16 and bfloat16 are computed in float32 and rounded once.

        Returns:
            The same shape and dtype.
        """
        wide = input.astype(wide_dtype(input.dtype))
        if self.approximate == "tanh":
            # The constants in torch's order: sqrt(2) * (2 / sqrt(pi)) / 2.
            inner = math.sqrt(2) * (2 / math.sqrt(math.pi)) * 0.5 * (wide + 0.044715 * (wide * wide * wide))
            return (0.5 * wide * (1 + jnp.tanh(inner))).astype(input.dtype)
        return (wide * 0.5 * (1 + lax.erf(wide * math.sqrt(0.5)))).astype(input.dtype)


class LayerNorm(nnx.LayerNorm):
    """Bring the last axis to mean 0 and variance 1, then scale and shift it.

    The variance is the mean square about the mean, over n, not n - 1.

    Args:
        width: of the last axis.
        eps: added to the variance.
        bias: whether there is a shift.

    Raises:
        InputError: the width is no positive whole number.

    Source:
        Ba et al. 2016, "Layer normalization".
    """

    def __init__(self, width: int, eps: float = 1e-5, *, bias: bool = True, rngs: nnx.Rngs):
        check_sizes("LayerNorm", width=width)
        super().__init__(width, epsilon=eps, use_bias=bias, use_fast_variance=False, rngs=rngs)
        self.width = width

    def __call__(self, input: Float[Array, "*n w"]) -> Float[Array, "*n w"]:
        """Normalise the last axis.

        Args:
            input: `(..., width)` in the dtype of the weights.

        Returns:
            The same shape and dtype.

        Raises:
            InputError: width, dtype or device is not that of the weights.
        """
        check_features("LayerNorm", input, self.width, self.scale[...])  # type: ignore[index]
        return super().__call__(input)


class RMSNorm(nnx.RMSNorm):
    """Divide the last axis by its root mean square, then scale it.

    Args:
        width: of the last axis.
        eps: added to the mean square.

    Raises:
        InputError: the width is no positive whole number.

    Source:
        Zhang and Sennrich 2019, "Root mean square layer normalization".
    """

    def __init__(self, width: int, eps: float = 1e-6, *, rngs: nnx.Rngs):
        check_sizes("RMSNorm", width=width)
        super().__init__(width, epsilon=eps, rngs=rngs)
        self.width = width

    def __call__(self, input: Float[Array, "*n w"]) -> Float[Array, "*n w"]:
        """Normalise the last axis.

        Args:
            input: `(..., width)` in the dtype of the weights.

        Returns:
            The same shape and dtype.

        Raises:
            InputError: width, dtype or device is not that of the weights.
        """
        check_features("RMSNorm", input, self.width, self.scale[...])  # type: ignore[index]
        return super().__call__(input)


class Embedding(nnx.Embed):
    """A row of numbers for every token. Initialised like `torch.nn.Embedding`: standard normal.

    Args:
        n_tokens: number of rows.
        width: of a row.

    Raises:
        InputError: a size is no positive whole number.
    """

    def __init__(self, n_tokens: int, width: int, *, rngs: nnx.Rngs):
        check_sizes("Embedding", n_tokens=n_tokens, width=width)
        super().__init__(n_tokens, width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        # Flax would remember the dtype of the first weights and go on computing in it when they are cast.
        self.dtype = None
        self.n_tokens = n_tokens
        self.width = width

    def __call__(self, input: Int[Array, "*n"]) -> Float[Array, "*n w"]:
        """Look rows up.

        Args:
            input: ids, any shape.

        Returns:
            `(..., width)` in the dtype of the weights.

        Raises:
            InputError: the ids are no integers, or one is outside [0, n_tokens).
        """
        check_tokens("Embedding", input, self.n_tokens)
        # jax would count a negative id from the end; in a traced program it gives NaN, like one too large.
        return self.embedding[...].at[input].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)

    def attend(self, input: Float[Array, "*n w"]) -> Float[Array, "*n v"]:
        """Multiply with every row: the output projection that is tied to the embedding.

        Args:
            input: `(..., width)` in the dtype of the weights.

        Returns:
            `(..., n_tokens)`.

        Raises:
            InputError: width, dtype or device is not that of the weights.
        """
        check_features("Embedding", input, self.width, self.embedding[...])
        return matmul(input, self.embedding[...].T)


def _uniform_within(bound: float) -> nnx.Initializer:
    """Initialiser: uniform in [-bound, bound), as `torch.nn.Linear` draws weight and bias alike."""

    def init(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32, **kwargs: object) -> Array:
        return jax.random.uniform(key, shape, dtype, minval=-bound, maxval=bound)

    return init
