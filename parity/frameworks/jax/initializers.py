"""Distributions of torch's initial parameters, as initialisers of jax: key, shape and dtype in, array out.

NNX passes initialisers more than that (how an array is sharded), which they need not know.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from parity.errors import InputError

Initializer = Callable[..., jax.Array]


def uniform(bound: float) -> Initializer:
    """Uniform in [-bound, bound)."""

    def init(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, minval=-bound, maxval=bound)

    return init


def uniform_by_rows() -> Initializer:
    """Uniform, by Glorot's bound of each kernel itself: its first axis is what comes in, the others what goes out."""

    def init(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any) -> jax.Array:
        return uniform(math.sqrt(6 / (shape[0] + math.prod(shape[1:]))))(key, shape, dtype)

    return init


def sum_of_two(bound: float) -> Initializer:
    """The sum of two numbers that are uniform in [-bound, bound)."""

    def init(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any) -> jax.Array:
        first, second = jax.random.split(key)
        return uniform(bound)(first, shape, dtype) + uniform(bound)(second, shape, dtype)

    return init


def gates_of_gru(bound: float, hidden_size: int) -> Initializer:
    """The bias of nnx.GRUCell: reset and update add two of torch's, the new state has one of them."""

    def init(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any) -> jax.Array:
        if shape != (3 * hidden_size,):
            raise InputError(
                f"the bias of a GRU cell must have the shape ({3 * hidden_size},) of nnx.GRUCell, got {shape}; Linen's GRUCell "
                "has one initialiser for biases that torch draws differently: initialise a torch layer and transfer it"
            )
        first, second = jax.random.split(key)
        gates = sum_of_two(bound)(first, (2 * hidden_size,), dtype)
        return jnp.concatenate([gates, uniform(bound)(second, (hidden_size,), dtype)])

    return init


def normal(zero_row: int | None) -> Initializer:
    """Standard normal, one row of zeros."""

    def init(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any) -> jax.Array:
        table = jax.random.normal(key, shape, dtype)
        return table if zero_row is None else table.at[zero_row].set(0)

    return init


def constant(value: float) -> Initializer:
    """One number everywhere."""

    def init(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any) -> jax.Array:
        return jnp.full(shape, value, dtype)

    return init
