"""An NNX model without values, made in the time that its layers take."""

import inspect
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
    if not takes_rngs(build):
        name = getattr(build, "__name__", type(build).__name__)
        raise InputError(
            f"build must take rngs by keyword, got {name}{inspect.signature(build)}; write it as "
            "parity.empty(lambda rngs: Model(..., rngs=rngs)), or give the class and what it is made from: "
            "parity.empty(Model, ...)",
            "no-rngs",
        )

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


def takes_rngs(build: Callable[..., Any]) -> bool:
    """Whether a function takes `rngs` by keyword, as far as it says what it takes."""
    try:
        known = inspect.signature(build).parameters
    except (TypeError, ValueError):
        return True
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(p.kind is p.VAR_KEYWORD or (name == "rngs" and p.kind in by_keyword) for name, p in known.items())


def change(root: Any, old: type, new: type) -> None:
    """Make every stream of one class below a node one of another."""
    for _, _, node in walk(root):
        if type(node) is old:
            object.__setattr__(node, "__class__", new)
