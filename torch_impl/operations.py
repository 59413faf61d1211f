"""The operations on which the two frameworks differ in the last bits or in meaning.

Here each is torch's own. The Flax wing spells out the same arithmetic under the same name.
"""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from torch_impl.checks import InputError, dtype_name


def matmul(a: Float[Tensor, "..."], b: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Matrix product over the last two axes.

    float16 and bfloat16 products are summed in float32 and rounded once.

    Args:
        a: `(..., m, k)`.
        b: `(..., k, n)`.

    Returns:
        `(..., m, n)` in the dtype of the operands.
    """
    return torch.matmul(a, b)


def einsum(subscripts: str, a: Float[Tensor, "..."], b: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Einstein sum of two arrays, summed like `matmul`.

    Args:
        subscripts: as in `numpy.einsum`.
        a: first operand.
        b: second operand.

    Returns:
        The sum in the dtype of the operands.
    """
    return torch.einsum(subscripts, a, b)


def divide(scores: Float[Tensor, "*shape"], divisor: float | Float[Tensor, ""]) -> Float[Tensor, "*shape"]:
    """Divide by a number, rounding once.

    Args:
        scores: any shape.
        divisor: not zero; float16 and bfloat16 scores are divided in float32.

    Returns:
        The quotient in the dtype and shape of `scores`.
    """
    return scores / divisor


def multiply(x: Float[Tensor, "*shape"], factor: float) -> Float[Tensor, "*shape"]:
    """Multiply by a number, rounding once.

    Args:
        x: any shape; float16 and bfloat16 are multiplied in float32.
        factor: in full precision, whatever the dtype of `x`.

    Returns:
        The product in the dtype and shape of `x`.
    """
    return x * factor


def rounded_sqrt(width: int, like: Float[Tensor, "..."]) -> Float[Tensor, ""]:
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
    return torch.sqrt(torch.tensor(width, dtype=like.dtype, device=like.device))


def is_zero(mask: Shaped[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Tell where a mask of any real dtype is zero; a denormal is not zero.

    Args:
        mask: boolean, integer or floating point.

    Returns:
        Booleans of that shape.
    """
    return mask == 0


def is_nonzero(mask: Shaped[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Tell where a mask of any real dtype is not zero; a denormal and NaN are not zero.

    Args:
        mask: boolean, integer or floating point.

    Returns:
        Booleans of that shape.
    """
    return mask.bool()


def hide(scores: Float[Tensor, "*shape"], hidden: Bool[Tensor, "..."], value: float) -> Float[Tensor, "*shape"]:
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
    largest = torch.finfo(scores.dtype).max
    if largest < abs(value) < float("inf"):
        raise InputError(
            f"hidden scores become {value:g}, which {dtype_name(scores)} cannot hold (largest {largest:g}); "
            "run this module in float32 or bfloat16"
        )
    return scores.masked_fill(hidden, value)


def softmax(scores: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Softmax over the last axis; float16 and bfloat16 are computed in float32 and rounded once.

    Args:
        scores: any shape; a row of minus infinities gives NaN.

    Returns:
        Weights of the same shape and dtype.
    """
    return torch.softmax(scores, dim=-1)
