"""Arrays of jax: what they are, and whether they have values."""

from typing import Any

import jax
import numpy as np


def is_array(value: Any) -> bool:
    return isinstance(value, jax.Array)


def unreadable(array: Any) -> str:
    """Why an array has no values that NumPy could hold, '' if it has."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return "is abstract and holds no values; it can be a target of transfer, not a source"
    if isinstance(array, jax.core.Tracer):
        return "is being traced and holds no values; call outside jit, grad and vmap"
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return "is spread over several machines and cannot be read from one of them"
    if not isinstance(array, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        return f"holds a {type(array).__name__}, not an array; leave it out with ignore"
    return ""
