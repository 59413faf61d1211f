"""A copy of an NNX model that trains, in float64 or as it is, while its owner's stays as it is."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from parity.frameworks.jax.running import cast
from parity.frameworks.jax.training import Arrays, Masks
from parity.frameworks.jax.training import Run as JaxRun
from parity.frameworks.nnx.leaves import content, model_dtype, to_numpy
from parity.frameworks.nnx.widening import follow_dtype, widened
from parity.training.recipe import Recipe


class Run(JaxRun):
    """A training run on copies. To be made and called under `pinned` of its dtype.

    Args:
        model: left as it is.
        loss: takes a model and a batch of arrays, gives an array without axes; or the name of one.
        recipe: what else happens in a step.
        dtype: float64, or None for the model's own.
        rename: as in `parity.transfer`, to find the places of dropout.
        silent: torch's paths of what drops nothing.
    """

    def __init__(
        self,
        model: Any,
        loss: Any,
        recipe: Recipe,
        dtype: str | None,
        rename: Mapping[str, str] | None = None,
        silent: tuple[str, ...] = (),
    ):
        model = nnx.clone(model)
        if recipe.train is not None:
            model.train() if recipe.train else model.eval()
        self.original = model
        graphdef, parameters, rest = nnx.split(model, nnx.Param, ...)
        self.graphdef: Any = graphdef
        self.paths = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(parameters)}
        flat = nnx.to_flat_state(rest)
        kept = {p: v if isinstance(v, nnx.RngState) else v.replace(own(content(v), dtype)) for p, v in flat}
        arrays = {name: own(content(leaf), dtype) for name, (_, leaf) in self.paths.items()}
        super().__init__(
            arrays, nnx.from_flat_state(kept), loss, recipe, dtype, model_dtype(model) or "float32", rename, silent
        )

    def evaluate(self, parameters: Any, rest: Any, batch: Any, masks: Masks) -> tuple[jax.Array, Any]:
        """The loss, and what the model holds besides its parameters afterwards."""
        full = nnx.from_flat_state({path: leaf.replace(parameters[name]) for name, (path, leaf) in self.paths.items()})
        # Variables can be written only where they were made: here, not outside of a gradient.
        model = nnx.merge(self.graphdef, full, jax.tree.map(lambda array: array, rest))
        if self.dtype == "float64":
            follow_dtype(model)
        with self.replayed(model, masks):
            value = self.loss(model, *batch)
        return value, nnx.split(model, nnx.Param, ...)[2]

    def nested(self, flat: Mapping[str, Any]) -> Any:
        """Arrays by path as the tree that a transformation is given."""
        tree: dict[Any, Any] = {}
        for name, array in flat.items():
            *above, last = self.paths[name][0]
            place = tree
            for key in above:
                place = place.setdefault(key, {})
            place[last] = array
        return tree

    def others(self, rest: Any) -> Mapping[str, Any]:
        """The arrays of the rest that torch may have too, by path."""
        flat = nnx.to_flat_state(rest)
        return {".".join(map(str, p)): content(v) for p, v in flat if not isinstance(v, nnx.RngState)}

    def with_others(self, rest: Any, arrays: Arrays) -> Any:
        """The rest with other arrays at these paths."""
        flat = {}
        for path, variable in nnx.to_flat_state(rest):
            array = arrays.get(".".join(map(str, path)))
            flat[path] = variable if array is None else variable.replace(jnp.asarray(array, content(variable).dtype, copy=True))
        return nnx.from_flat_state(flat)

    def widened(self) -> AbstractContextManager[None]:
        """Leave out casts that would cut a float64 run."""
        return widened(self.original, self.dtype)


def own(array: Any, dtype: str | None) -> jax.Array:
    """A copy, floating point values in a dtype."""
    return jnp.array(cast(to_numpy(array), dtype), copy=True)
