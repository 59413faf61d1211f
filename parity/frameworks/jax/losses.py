"""Losses by name; those of torch are in `parity.frameworks.torch.losses`, line by line."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from parity.evidence.trees import flatten
from parity.frameworks.jax.arrays import is_array


def called(model: Any, batch: tuple[Any, ...]) -> Any:
    """The model on a batch; a dict at its end holds keyword arguments."""
    *args, last = batch
    return model(*args, **last) if isinstance(last, dict) else model(*batch)


def split(batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    return batch[:-1], batch[-1]


def cross_entropy(model: Any, *batch: Any) -> jax.Array:
    """The mean over all targets but -100."""
    inputs, target = split(batch)
    scores = called(model, inputs)
    likely = jax.nn.log_softmax(scores.reshape(-1, scores.shape[-1]), axis=-1)
    wanted = target.reshape(-1)
    counts = wanted != -100
    chosen = jnp.take_along_axis(likely, jnp.where(counts, wanted, 0)[:, None], axis=-1)[:, 0]
    return -jnp.where(counts, chosen, 0).sum() / counts.sum()


def mse(model: Any, *batch: Any) -> jax.Array:
    """The mean of squared differences."""
    inputs, target = split(batch)
    return jnp.square(called(model, inputs) - target).mean()


def l1(model: Any, *batch: Any) -> jax.Array:
    """The mean of absolute differences."""
    inputs, target = split(batch)
    return jnp.abs(called(model, inputs) - target).mean()


def square(model: Any, *batch: Any) -> jax.Array:
    """The mean of the squares of every output, summed over outputs."""
    outputs = [leaf for _, leaf in flatten(called(model, batch), is_array) if is_array(leaf)]
    return jnp.stack([jnp.square(output).mean() for output in outputs if jnp.issubdtype(output.dtype, jnp.floating)]).sum()


LOSSES: dict[str, Callable[..., jax.Array]] = {"cross_entropy": cross_entropy, "mse": mse, "l1": l1, "square": square}
