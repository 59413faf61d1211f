"""The operations on which the two frameworks differ in the last bits or in meaning.

Here torch's arithmetic is spelled out; the PyTorch wing has torch's own under the same name.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Shaped

from jax_impl.checks import InputError, dtype_name


def matmul(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """Matrix product over the last two axes.

    float16 and bfloat16 products are summed in float32 and rounded once.

    Args:
        a: `(..., m, k)`.
        b: `(..., k, n)`.

    Returns:
        `(..., m, n)` in the dtype of the operands.
    """
    return wide_matmul(a, b).astype(a.dtype)


def einsum(subscripts: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """Einstein sum of two arrays, summed like `matmul`.

    Args:
        subscripts: as in `numpy.einsum`.
        a: first operand.
        b: second operand.

    Returns:
        The sum in the dtype of the operands.
    """
    wide = jnp.einsum(subscripts, a, b, preferred_element_type=wide_dtype(a.dtype), precision=_matmul_precision())
    return wide.astype(a.dtype)


def divide(scores: Float[Array, "*shape"], divisor: float | Float[Array, ""]) -> Float[Array, "*shape"]:
    """Divide by a number, rounding once.

    Args:
        scores: any shape.
        divisor: not zero; float16 and bfloat16 scores are divided in float32.

    Returns:
        The quotient in the dtype and shape of `scores`.
    """
    wide = scores.astype(wide_dtype(scores.dtype))
    if math.frexp(divisor)[0] == 0.5:
        return (wide * (1 / divisor)).astype(scores.dtype)
    # XLA rewrites x / c to x * (1 / c), which rounds twice; it does not look behind a barrier.
    divisors = lax.optimization_barrier(jnp.full_like(wide, divisor))
    return (wide / divisors).astype(scores.dtype)


def multiply(x: Float[Array, "*shape"], factor: float) -> Float[Array, "*shape"]:
    """Multiply by a number, rounding once.

    Args:
        x: any shape; float16 and bfloat16 are multiplied in float32.
        factor: in full precision, whatever the dtype of `x`.

    Returns:
        The product in the dtype and shape of `x`.
    """
    return (x.astype(wide_dtype(x.dtype)) * factor).astype(x.dtype)


def rounded_sqrt(width: int, like: Float[Array, "..."]) -> float | Float[Array, ""]:
    """Square root of a width, rounded to the dtype of `like`, as is the width itself first.

    Args:
        width: a head width.
        like: the array whose dtype decides.

    Returns:
        The root. In bfloat16 the root of 48 is 6.9375, not 6.9282.

    Source:
        the third document's `torch.sqrt(torch.tensor(d_k, dtype=Q.dtype))`. torch's float32
        and float64 roots are not correctly rounded everywhere: 27 and 41 of the widths
        below 5,000 are one ulp off with torch 2.13 on AVX-512.
    """
    wide = np.asarray(width, like.dtype).astype(wide_dtype(like.dtype))
    return float(np.sqrt(wide).astype(like.dtype))


def is_zero(mask: Shaped[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Tell where a mask of any real dtype is zero; a denormal is not zero.

    Args:
        mask: boolean, integer or floating point.

    Returns:
        Booleans of that shape.
    """
    return ~is_nonzero(mask)


def is_nonzero(mask: Shaped[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Tell where a mask of any real dtype is not zero; a denormal and NaN are not zero.

    Args:
        mask: boolean, integer or floating point.

    Returns:
        Booleans of that shape.
    """
    if isinstance(mask, np.ndarray):
        # Without x64 jax would narrow 64-bit numbers first, and some would become zero.
        return jnp.asarray(mask != 0)
    if not jnp.issubdtype(mask.dtype, jnp.floating):
        return mask != 0
    # XLA on the CPU flushes denormals to zero before it compares; their bits it leaves alone.
    bits = lax.bitcast_convert_type(mask, f"uint{8 * mask.dtype.itemsize}")
    return (bits << 1) != 0


def hide(scores: Float[Array, "*shape"], hidden: Bool[Array, "..."], value: float) -> Float[Array, "*shape"]:
    """Put `value` in place of the hidden scores.

    Args:
        scores: any shape.
        hidden: broadcasts to `scores`; True hides.
        value: what a hidden score becomes.

    Returns:
        Scores of the same shape and dtype.

    Raises:
        InputError: `value` is finite and overflows the scores' dtype, as -1e20 does in float16.
    """
    largest = float(jnp.finfo(scores.dtype).max)
    if largest < abs(value) < float("inf"):
        raise InputError(
            f"hidden scores become {value:g}, which {dtype_name(scores)} cannot hold (largest {largest:g}); "
            "run this module in float32 or bfloat16"
        )
    return jnp.where(hidden, jnp.asarray(value, scores.dtype), scores)


def softmax(scores: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Softmax over the last axis; float16 and bfloat16 are computed in float32 and rounded once.

    Args:
        scores: any shape; a row of minus infinities gives NaN.

    Returns:
        Weights of the same shape and dtype.
    """
    if scores.shape[-1:] == (1,):
        # Compiled for the CPU (jax 0.10.2), a softmax over one number that is infinite is whatever its memory held before.
        return scores * 0 + 1
    return jax.nn.softmax(scores.astype(wide_dtype(scores.dtype)), axis=-1).astype(scores.dtype)


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which torch computes: float32 for the half precisions, itself otherwise.

    Args:
        dtype: of the operands.

    Returns:
        The wider dtype.
    """
    return jnp.promote_types(dtype, jnp.float32)


def wide_matmul(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """`matmul` before its result is rounded.

    Args:
        a: `(..., m, k)`.
        b: `(..., k, n)`.

    Returns:
        `(..., m, n)` in the `wide_dtype` of the operands.
    """
    return jnp.matmul(a, b, preferred_element_type=wide_dtype(a.dtype), precision=_matmul_precision())


def _matmul_precision() -> lax.Precision | None:
    """Full float32 products, torch's default, unless the user chose a precision for all of jax.

    Left alone, XLA multiplies float32 matrices in TF32 on NVIDIA GPUs.
    """
    return lax.Precision.HIGHEST if jax.config.jax_default_matmul_precision is None else None
