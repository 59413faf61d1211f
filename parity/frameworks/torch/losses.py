"""Losses by name; those of Flax are in `parity.frameworks.jax.losses`, line by line."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from parity.evidence.trees import flatten
from parity.frameworks.torch.leaves import is_array


def called(model: Any, batch: tuple[Any, ...]) -> Any:
    """The model on a batch; a dict at its end holds keyword arguments."""
    *args, last = batch
    return model(*args, **last) if isinstance(last, dict) else model(*batch)


def split(batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    return batch[:-1], batch[-1]


def cross_entropy(model: Any, *batch: Any) -> Tensor:
    """The mean over all targets but -100."""
    inputs, target = split(batch)
    scores = called(model, inputs)
    return functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), target.reshape(-1).long())


def mse(model: Any, *batch: Any) -> Tensor:
    """The mean of squared differences."""
    inputs, target = split(batch)
    return (called(model, inputs) - target).square().mean()


def l1(model: Any, *batch: Any) -> Tensor:
    """The mean of absolute differences."""
    inputs, target = split(batch)
    return (called(model, inputs) - target).abs().mean()


def square(model: Any, *batch: Any) -> Tensor:
    """The mean of the squares of every output, summed over outputs."""
    outputs = [leaf for _, leaf in flatten(called(model, batch), is_array) if is_array(leaf) and leaf.is_floating_point()]
    return torch.stack([output.square().mean() for output in outputs]).sum()


LOSSES: dict[str, Callable[..., Tensor]] = {"cross_entropy": cross_entropy, "mse": mse, "l1": l1, "square": square}
