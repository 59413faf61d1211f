"""A copy of a Linen model that trains, in float64 or as it is, while its owner's stays as it is."""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from parity.frameworks.jax.running import cast
from parity.frameworks.jax.training import Arrays, Masks
from parity.frameworks.jax.training import Run as JaxRun
from parity.frameworks.linen.leaves import flat, model_dtype
from parity.frameworks.linen.running import following, nested, widened
from parity.frameworks.nnx.leaves import to_numpy
from parity.linen import Linen
from parity.training.recipe import Recipe

# What a call is told to train, by the usual names of the keyword.
TRAINING = {"train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False}


class Applied:
    """A Linen model as a function that keeps what it writes into its variables.

    Args:
        model: whose variables are replaced.
        variables: collections.
        kwargs: of every call, unless the caller gives others.
    """

    def __init__(self, model: Linen, variables: Mapping[str, Any], kwargs: Mapping[str, Any]):
        self.model, self.variables, self.kwargs = model, dict(variables), kwargs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        written = [name for name in self.variables if name != "params"]
        options = {"method": self.model.method, "rngs": self.model.rngs or None, **self.kwargs, **kwargs}
        output, new = self.model.module.apply(self.variables, *args, mutable=written, **options)
        self.variables |= nn.unbox(dict(new))
        return output


class Run(JaxRun):
    """A training run on copies. To be made and called under `pinned` of its dtype.

    Args:
        model: left as it is.
        loss: takes a function that is the model, and a batch of arrays; or the name of one.
        recipe: what else happens in a step.
        dtype: float64, or None for the model's own.
        rename: as in `parity.transfer`, to find the places of dropout.
        silent: torch's paths of what drops nothing.
    """

    def __init__(
        self,
        model: Linen,
        loss: Any,
        recipe: Recipe,
        dtype: str | None,
        rename: Mapping[str, str] | None = None,
        silent: tuple[str, ...] = (),
    ):
        self.original = model
        known = {name: TRAINING[name] for name in model.kwargs if name in TRAINING}
        told = {} if recipe.train is None else {name: yes is recipe.train for name, yes in known.items()}
        self.kwargs = {**model.kwargs, **told}
        arrays = flat(model.variables)
        made = {k: a if is_key(a) else jnp.array(cast(to_numpy(a), dtype), copy=True) for k, a in arrays.items()}
        self.keys = {".".join(k): k for k in made}
        parameters = {".".join(k): a for k, a in made.items() if k[0] == "params"}
        rest = {".".join(k): a for k, a in made.items() if k[0] != "params"}
        super().__init__(parameters, rest, loss, recipe, dtype, model_dtype(model) or "float32", rename, silent)

    def evaluate(self, parameters: Any, rest: Any, batch: Any, masks: Masks) -> tuple[jax.Array, Any]:
        """The loss, and what the model holds besides its parameters afterwards."""
        variables = nested({self.keys[name]: array for name, array in (parameters | rest).items()})
        function = Applied(self.original, variables, self.kwargs)
        wide = following(jnp.float64) if self.dtype == "float64" else contextlib.nullcontext()
        with wide, self.replayed(self.original, masks):
            value = self.loss(function, *batch)
        new = {".".join(keys): array for keys, array in flat(function.variables).items()}
        # Collections that a run makes anew, such as intermediates, are no part of the model.
        return value, {name: new[name] for name in rest}

    def nested(self, flat: Mapping[str, Any]) -> Any:
        """Arrays by path as the tree that a transformation is given: what is in `params`."""
        return nested({self.keys[name][1:]: array for name, array in flat.items()})

    def others(self, rest: Any) -> Mapping[str, Any]:
        """The arrays of the rest that torch may have too, by path."""
        return {name: array for name, array in rest.items() if not is_key(array)}

    def with_others(self, rest: Any, arrays: Arrays) -> Any:
        """The rest with other arrays at these paths."""
        return {n: jnp.asarray(arrays[n], a.dtype, copy=True) if n in arrays else a for n, a in rest.items()}

    def widened(self) -> AbstractContextManager[None]:
        """Leave out casts that would cut a float64 run."""
        return widened(self.original, self.dtype)


def is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
