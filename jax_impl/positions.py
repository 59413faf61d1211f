"""Where a token stands: sinusoids added to the embedding, or queries and keys turned by it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from jax_impl.checks import InputError, check_features, check_sizes


@functools.lru_cache(maxsize=16)
def angles(length: int, width: int, base: float) -> np.ndarray:
    """The angle of every position at every frequency, `position / base^(2 i / width)`.

    Args:
        length: number of positions.
        width: twice the number of frequencies.
        base: ratio of the longest wave to the shortest.

    Returns:
        `(length, width / 2)` in float64, in radians.

    Source:
        Vaswani et al. 2017, section 3.5; Su et al. 2021, "RoFormer", equation 15.
    """
    return np.arange(length)[:, None] * base ** (-np.arange(0, width, 2) / width)


@functools.lru_cache(maxsize=16)
def sinusoids(length: int, width: int) -> np.ndarray:
    """The table of positions of the 2017 paper: sine at even places, cosine at odd ones.

    Args:
        length: number of positions.
        width: of the embedding; even.

    Returns:
        `(length, width)` in float64.

    Source:
        Vaswani et al. 2017, section 3.5.
    """
    turned = angles(length, width, 10000.0)
    return np.stack([np.sin(turned), np.cos(turned)], axis=-1).reshape(length, width)


def rounded(table: Float[Array | np.ndarray, "..."], like: Float[Array, "..."]) -> Float[Array, "..."]:
    """A float64 table rounded once to the dtype of an array.

    Args:
        table: any shape.
        like: the array whose dtype and device decide.

    Returns:
        The table in that dtype.
    """
    return jnp.asarray(table.astype(like.dtype))


class SinusoidalPositions(nnx.Module):
    """Add the sinusoids of the 2017 paper. No parameters and no buffers: the table is made in float64 and rounded once.

    Args:
        d_model: width of the input; even.
        max_len: the longest sequence.

    Raises:
        InputError: a size is no positive whole number, or d_model is odd.

    Source:
        Vaswani et al. 2017, section 3.5.
    """

    def __init__(self, d_model: int = 512, max_len: int = 1024):
        check_sizes("SinusoidalPositions", d_model=d_model, max_len=max_len)
        _check_even("SinusoidalPositions", "d_model", d_model)
        self.d_model = d_model
        self.max_len = max_len

    def __call__(self, x: Float[Array, "n l e"], offset: int | Int[Array, ""] = 0) -> Float[Array, "n l e"]:
        """Add to each position its row of the table.

        Args:
            x: `(n, l, d_model)`.
            offset: position of the first token.

        Returns:
            The same shape and dtype.

        Raises:
            InputError: the width is another one, or the sequence is longer than max_len.
        """
        check_features("SinusoidalPositions", x, self.d_model, x)
        check_length("SinusoidalPositions", x.shape[1], offset, self.max_len)
        table = rounded(sinusoids(self.max_len, self.d_model), x)
        return x + _rows(table, offset, x.shape[1])


class RotaryPositions(nnx.Module):
    """Turn each pair of a head's coordinates by an angle that grows with the position.

    The pairs are coordinate i and i + d / 2, the convention of GPT-NeoX and LLaMA; the paper pairs
    neighbours, which is the same up to an order of the rows of the projections.

    Args:
        width: head width d; even.
        max_len: the longest sequence.
        base: ratio of the longest wave to the shortest.

    Raises:
        InputError: a size is no positive whole number, or the width is odd.

    Source:
        Su et al. 2021, "RoFormer: enhanced Transformer with rotary position embedding", section 3.2.
    """

    def __init__(self, width: int = 64, max_len: int = 1024, base: float = 10000.0):
        check_sizes("RotaryPositions", width=width, max_len=max_len)
        _check_even("RotaryPositions", "width", width)
        self.width = width
        self.max_len = max_len
        self.base = base

    def __call__(self, x: Float[Array, "n h l d"], offset: int | Int[Array, ""] = 0) -> Float[Array, "n h l d"]:
        """Turn queries or keys.

        Args:
            x: `(n, h, l, width)`.
            offset: position of the first token.

        Returns:
            The same shape and dtype.

        Raises:
            InputError: the width is another one, or the sequence is longer than max_len.
        """
        check_features("RotaryPositions", x, self.width, x)
        check_length("RotaryPositions", x.shape[2], offset, self.max_len)
        turned = angles(self.max_len, self.width, self.base)
        cos = _rows(rounded(np.cos(turned), x), offset, x.shape[2])
        sin = _rows(rounded(np.sin(turned), x), offset, x.shape[2])
        first, second = x[..., : self.width // 2], x[..., self.width // 2 :]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def check_length(where: str, length: int, offset: int | Int[Array, ""], max_len: int) -> None:
    """Refuse positions beyond the table.

    Args:
        where: what was called.
        length: of the sequence.
        offset: position of its first token.
        max_len: number of positions.

    Raises:
        InputError: the sequence ends beyond max_len.
    """
    # Where a program is traced the position is not known yet; greedy_decode has checked it before.
    if not isinstance(offset, jax.core.Tracer) and offset + length > max_len:
        raise InputError(f"{where}: {offset + length} positions are wanted and max_len is {max_len}; give a larger max_len")


def _check_even(where: str, name: str, width: int) -> None:
    if width % 2:
        raise InputError(f"{where}: {name} must be even, for sine and cosine come in pairs, got {width}")


def _rows(table: Float[Array, "..."], offset: int | Int[Array, ""], length: int) -> Float[Array, "..."]:
    return lax.dynamic_slice_in_dim(table, offset, length)
