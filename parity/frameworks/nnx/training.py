"""A copy of an NNX model that trains in float64, compiled, while its owner's stays as it is."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from parity.frameworks.jax.running import QUICK, cast, platform
from parity.frameworks.nnx.leaves import content, to_numpy
from parity.frameworks.nnx.widening import follow_dtype, widened

Arrays = dict[str, Any]


class Run:
    """A training run on copies. To be made and called under `pinned(double=True)`.

    Args:
        model: left as it is, in the mode that it is in.
        loss: takes a model and a batch of arrays, gives an array without axes.
    """

    def __init__(self, model: Any, loss: Callable[..., jax.Array]):
        self.original, self.loss = model, loss
        graphdef, parameters, rest = nnx.split(model, nnx.Param, ...)
        self.graphdef: Any = graphdef
        self.paths = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(parameters)}
        self.parameters: Arrays = {name: wide(content(leaf)) for name, (_, leaf) in self.paths.items()}
        flat = nnx.to_flat_state(rest)
        self.rest = nnx.from_flat_state({p: v if isinstance(v, nnx.RngState) else v.replace(wide(content(v))) for p, v in flat})
        self.tx: optax.GradientTransformation = optax.identity()
        self.state: Any = None

    def train_by(self, tx: Any) -> None:
        """Take the steps of a transformation from here on."""
        self.tx, self.state = tx, tx.init(self.parameters)

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        def step(parameters: Arrays, rest: Any, state: Any, batch: Sequence[Any]) -> Any:
            differentiated = jax.value_and_grad(self.evaluate, has_aux=True)
            (value, new_rest), gradients = differentiated(parameters, rest, batch)
            updates, new_state = self.tx.update(gradients, state, parameters)
            return value, gradients, optax.apply_updates(parameters, updates), new_rest, new_state

        return jax.jit(step, compiler_options=QUICK.get(platform()))

    def evaluate(self, parameters: Arrays, rest: Any, batch: Sequence[Any]) -> tuple[jax.Array, Any]:
        """The loss, and what the model changed besides its parameters."""
        full = nnx.from_flat_state({path: leaf.replace(parameters[name]) for name, (path, leaf) in self.paths.items()})
        # Variables can be written only where they were made: here, not outside of a gradient.
        model = follow_dtype(nnx.merge(self.graphdef, full, jax.tree.map(lambda array: array, rest)))
        value = self.loss(model, *batch)
        return value, nnx.split(model, nnx.Param, ...)[2]

    def step(self, batch: Sequence[np.ndarray]) -> tuple[float, Mapping[str, np.ndarray]]:
        """One step; the loss and the gradients before it, by path."""
        with widened(self.original, "float64"):
            arrays = [jnp.asarray(cast(np.asarray(array), "float64")) for array in batch]
            value, gradients, self.parameters, self.rest, self.state = self.compiled(
                self.parameters, self.rest, self.state, arrays
            )
        return float(value), {name: np.array(g) for name, g in gradients.items()}

    def values(self) -> Mapping[str, np.ndarray]:
        """Parameters and other variables by path."""
        rest = {".".join(map(str, p)): v for p, v in nnx.to_flat_state(self.rest) if not isinstance(v, nnx.RngState)}
        return {name: np.array(a) for name, a in self.parameters.items()} | {n: np.array(content(v)) for n, v in rest.items()}


def wide(array: Any) -> jax.Array:
    return jnp.asarray(cast(to_numpy(array), "float64"))
