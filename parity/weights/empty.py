"""A Flax model that waits for its parameters."""

from collections.abc import Callable
from typing import Any

from parity.frameworks import load


def empty(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make an NNX model that has shapes and dtypes but no values yet, as a target of `transfer`.

    No memory for parameters is taken and no random number is drawn; filling it costs more. It is what
    `nnx.eval_shape` gives, several times sooner where there are hundreds of layers.

    Args:
        build: a module's class, or a function that makes a module; it must take `rngs` by keyword.
        args: passed on to it.
        kwargs: passed on to it; `rngs` is added.

    Returns:
        The module. Its parameters are `jax.ShapeDtypeStruct` until `transfer` has filled it; random state, such
        as a dropout layer's, gets keys from seed 0 then.

    Raises:
        InputError: `build` does not take `rngs`, made no `nnx.Module`, or one that holds arrays without an `nnx.Variable`
            around them.
        MissingFrameworkError: Flax is not installed.
    """
    return load("nnx").empty(build, *args, **kwargs)
