"""The leaf layers: torch's semantics, with errors that name the values.

A layer's parameters are `flax.nnx`'s; their initial distributions are `torch.nn`'s.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from jax_impl.checks import check_features, check_probability, check_sizes
from jax_impl.operations import wide_dtype, wide_matmul


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
    """`max(x, 0)`, with gradient 0 at 0; NaN stays NaN."""

    def __call__(self, input: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Clip at zero.

        Args:
            input: any shape.

        Returns:
            The same shape and dtype.
        """
        # jnp.maximum(x, 0) would have gradient 1/2 at 0.
        return jax.nn.relu(input)


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


def _uniform_within(bound: float) -> nnx.Initializer:
    """Initialiser: uniform in [-bound, bound), as `torch.nn.Linear` draws weight and bias alike."""

    def init(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32, **kwargs: object) -> Array:
        return jax.random.uniform(key, shape, dtype, minval=-bound, maxval=bound)

    return init
