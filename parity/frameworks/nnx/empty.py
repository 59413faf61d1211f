"""An NNX model without values, made in the time that its layers take."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from parity.errors import InputError
from parity.frameworks.nnx.leaves import is_model, walk


class OneKey(nnx.RngStream):
    """A stream that gives the same key again and again.

    A stream that counts writes its counter, which flax compares with the old one in a way that makes jax search
    all that was traced so far: the time of `nnx.eval_shape` grows with the square of the number of layers.
    """

    def __call__(self) -> jax.Array:
        return self.key[...]


def empty(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `build(*args, **kwargs, rngs=...)` makes, with shapes and dtypes in place of values."""

    def made() -> Any:
        rngs = nnx.Rngs(0)
        change(rngs, nnx.RngStream, OneKey)
        model = build(*args, **kwargs, rngs=rngs)
        if not is_model(model):
            raise InputError(f"build must make an nnx.Module, got {type(model).__module__}.{type(model).__qualname__}")
        change(model, OneKey, nnx.RngStream)
        return model

    model = nnx.eval_shape(made)
    # Flax takes an array that is not marked as data for a setting, and leaves in it what jax traced with.
    traced = [".".join(path) for path, _, node in walk(model) if isinstance(node, jax.core.Tracer)]
    if traced:
        raise InputError(
            f"{', '.join(traced[:4])}{' and others' if len(traced) > 4 else ''} of the model is an array and no nnx.Variable: "
            "it has no values where the model is made on shapes alone; make it an nnx.Variable, or the model itself as usual"
        )
    return model


def change(root: Any, old: type, new: type) -> None:
    """Make every stream of one class below a node one of another."""
    for _, _, node in walk(root):
        if type(node) is old:
            object.__setattr__(node, "__class__", new)
