"""Letting an NNX model run in float64 although it asks for the dtype in which it is deployed."""

from contextlib import AbstractContextManager
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.recurrent import RNNCellBase

from parity.frameworks.jax import widening
from parity.frameworks.nnx.leaves import content, model_dtype, walk


def follow_dtype(model: Any) -> Any:
    """Let the embeddings of a merged copy compute in the dtype of their tables, and cells begin in that of their weights.

    `nnx.Embed` writes down the dtype of its table when it is made, also if the caller named none;
    a recurrent cell makes its first state in the dtype in which its weights once were made.
    """
    for _, _, node in walk(model):
        if isinstance(node, nnx.Embed):
            node.dtype = content(node.embedding).dtype
        if isinstance(node, RNNCellBase):
            node.param_dtype = jnp.dtype(model_dtype(node) or "float32")  # type: ignore[attr-defined]
    return model


def widened(model: Any, dtype: str | None) -> AbstractContextManager[None]:
    """Leave out casts that would cut a float64 run to the dtype in which the model is deployed."""
    return widening.widened(model_dtype(model) or "float32", dtype)
