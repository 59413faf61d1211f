"""A copy of a Flax model that trains while its owner's stays as it is: what NNX and Linen have in common."""

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from parity.dropout.contexts import played
from parity.dropout.masks import DropoutMasks
from parity.errors import InputError
from parity.evidence.trees import mapped
from parity.frameworks.jax.losses import LOSSES
from parity.frameworks.jax.running import QUICK, cast, platform
from parity.frameworks.optax.scaling import LossScaleState, found, loss_scale, scaled, scheduled
from parity.training.recipe import Recipe

Arrays = Mapping[str, np.ndarray]
# What torch dropped, of which only the plan counts, and the masks themselves as arrays of a program.
Masks = tuple[DropoutMasks, Mapping[str, Any]] | None


def whole_loss(value: Any) -> jax.Array:
    """What a loss gave, if a gradient can be taken of it.

    Raises:
        InputError: none can.
    """
    if not isinstance(value, jax.Array | np.ndarray | float):
        raise InputError(f"Flax's loss must return an array without axes, got {type(value).__name__}; return the loss alone")
    array = jnp.asarray(value)
    if array.ndim or not jnp.issubdtype(array.dtype, jnp.floating):
        raise InputError(f"Flax's loss must return one real number, got shape {array.shape} of {array.dtype}; take its mean")
    return array


class Run:
    """A training run on copies. To be made and called under `pinned` of its dtype.

    A room says what its models are: `evaluate`, `nested`, `others`, `widened`.

    Args:
        parameters: by path.
        rest: what else the model holds, as a tree of arrays.
        loss: takes a model and a batch of arrays, gives an array without axes; or the name of one.
        recipe: what else happens in a step.
        dtype: float64, or None for the model's own.
        deployed: the model's own.
        rename: as in `parity.transfer`, to find the places of dropout.
        silent: torch's paths of what drops nothing.
    """

    def __init__(
        self,
        parameters: Mapping[str, jax.Array],
        rest: Any,
        loss: Any,
        recipe: Recipe,
        dtype: str | None,
        deployed: str,
        rename: Mapping[str, str] | None,
        silent: tuple[str, ...] = (),
    ):
        self.parameters, self.rest = dict(parameters), rest
        self.loss: Callable[..., jax.Array] = LOSSES[loss] if isinstance(loss, str) else loss
        self.recipe, self.dtype, self.deployed = recipe, dtype, deployed
        self.programs: dict[Any, Callable[..., Any]] = {}
        self.rename, self.silent = rename, silent
        self.last: Any = None
        self.tx: Any = optax.identity()
        self.state: Any = None

    # --- what a room says ---------------------------------------------------------------------

    def evaluate(self, parameters: Any, rest: Any, batch: Any, masks: Masks) -> tuple[jax.Array, Any]:
        """The loss, and what the model holds besides its parameters afterwards."""
        raise NotImplementedError

    def nested(self, flat: Mapping[str, Any]) -> Any:
        """Arrays by path as the tree that a transformation is given."""
        raise NotImplementedError

    def others(self, rest: Any) -> Mapping[str, Any]:
        """The arrays of the rest that torch may have too, by path."""
        raise NotImplementedError

    def with_others(self, rest: Any, arrays: Arrays) -> Any:
        """The rest with other arrays at these paths."""
        raise NotImplementedError

    def widened(self) -> AbstractContextManager[None]:
        """Leave out casts that would cut a float64 run."""
        raise NotImplementedError

    # --- steps --------------------------------------------------------------------------------

    def train_by(self, tx: Any, state: Any = None, scaling: Mapping[str, float] | None = None) -> None:
        """Take the steps of a transformation from here on.

        Args:
            tx: of optax.
            state: of it; None for that of `init`.
            scaling: options of a GradScaler, for a transformation that scales no loss by itself.
        """
        if isinstance(tx, optax.MultiSteps) and self.dtype == "float64":
            # It sums in float32 unless it is told, which float64 gradients show.
            tx = copy.copy(tx)
            tx._accumulator_dtype = jnp.dtype("float64")
        self.tx = tx
        first = tx.init(self.nested(self.parameters)) if state is None else jax.tree.map(jnp.asarray, state)
        if scaling and found(first) is None:
            self.tx = scaled(tx, **scaling)  # type: ignore[arg-type]
            first = self.tx.init(self.nested(self.parameters))
            first = first if state is None else first._replace(inner=jax.tree.map(jnp.asarray, state))
        self.state = first

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped."""
        here: LossScaleState | None = found(self.state)
        return here is not None and bool(here.skipped)

    @property
    def scale(self) -> float:
        """By which the loss is multiplied."""
        return float(loss_scale(self.state))

    @property
    def alone(self) -> bool:
        """Whether the transformation sees every batch, because it accumulates by itself."""
        return isinstance(self.tx, optax.MultiSteps)

    def replayed(self, model: Any, masks: Masks) -> AbstractContextManager[None]:
        """Let a model drop by given masks, if there are any."""
        return contextlib.nullcontext() if masks is None else played(model, *masks, rename=self.rename, silent=self.silent)

    def differentiate(self, masks: DropoutMasks | None) -> Callable[..., Any]:
        """The program that gives loss, the rest and gradients; one serves all masks of one plan."""
        plan = None if masks is None else masks.plan
        if plan not in self.programs:
            self.programs[plan] = self.differentiated(masks)
        return self.programs[plan]

    def differentiated(self, masks: DropoutMasks | None) -> Callable[..., Any]:
        def factored(parameters: Any, rest: Any, batch: Any, arrays: Any, factors: Any) -> Any:
            value, new = self.evaluate(parameters, rest, batch, None if masks is None else (masks, arrays))
            value = whole_loss(value)
            # As torch does: first divided by the number of batches, then multiplied by the scale.
            whole = value
            for factor in factors:
                whole = whole * factor.astype(value.dtype)
            return whole, (value, new)

        def differentiated(parameters: Any, *others: Any) -> Any:
            (_, (value, new)), gradients = jax.value_and_grad(factored, has_aux=True)(parameters, *others)
            return value, new, gradients

        return self.compiled(differentiated)

    @functools.cached_property
    def advance(self) -> Callable[..., Any]:
        def advanced(parameters: Any, gradients: Any, state: Any) -> Any:
            tree = self.nested(parameters)
            updates, new_state = self.tx.update(self.nested(gradients), state, tree)
            return jax.tree.leaves(optax.apply_updates(tree, updates)), new_state

        return self.compiled(advanced)

    def compiled(self, body: Callable[..., Any]) -> Callable[..., Any]:
        if self.recipe.mode == "eager":
            return body
        return jax.jit(body, compiler_options=QUICK.get(platform()) if self.dtype == "float64" else None)

    def arrays(self, batch: Sequence[Any]) -> Any:
        dtype = self.dtype or self.deployed

        def array(path: str, value: Any) -> Any:
            return jnp.asarray(cast(value, dtype)) if isinstance(value, np.ndarray) else value

        return mapped(array, tuple(batch))

    def gradients(
        self, batches: Sequence[Sequence[Any]], masks: Sequence[DropoutMasks] | None = None
    ) -> tuple[float, dict[str, Any]]:
        """The mean loss of some batches, and the gradient of each parameter, of the loss as it is scaled.

        Args:
            batches: as many as are accumulated.
            masks: for each batch, what torch dropped; None leaves dropout to Flax.
        """
        values, total = [], dict[str, Any]()
        factors = [np.float64(1 / len(batches))] if len(batches) > 1 and not self.alone else []
        factors += [np.float64(self.scale)] if found(self.state) is not None else []
        for number, batch in enumerate(batches):
            with self.widened():
                given = None if masks is None else masks[number]
                value, self.rest, gradients = self.differentiate(given)(
                    *(self.parameters, self.rest, self.arrays(batch), {} if given is None else given.arrays()),
                    [jnp.asarray(factor) for factor in factors],
                )
            values.append(float(value))
            if self.alone:
                total = {name: total.get(name, 0) + g / len(batches) for name, g in gradients.items()}
                self.update(gradients) if number + 1 < len(batches) else setattr(self, "last", gradients)
            else:
                total = {name: total[name] + g for name, g in gradients.items()} if total else gradients
        return sum(values) / len(values), total

    def unscaled(self, gradients: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Gradients of the loss itself."""
        factor = 1 / loss_scale(self.state)
        return {name: np.array(g * factor.astype(g.dtype)) for name, g in gradients.items()}

    def update(self, gradients: Mapping[str, Any]) -> None:
        """One step of the transformation on gradients that `gradients` gave."""
        leaves, self.state = self.advance(self.parameters, gradients, self.state)
        names = jax.tree.leaves(self.nested({name: name for name in self.parameters}))
        self.parameters = dict(zip(names, leaves, strict=True))

    def values(self) -> dict[str, np.ndarray]:
        """Parameters and other variables by path."""
        others = {name: np.array(a) for name, a in self.others(self.rest).items()}
        return {name: np.array(a) for name, a in self.parameters.items()} | others

    def load(self, arrays: Arrays) -> None:
        """Go on from other parameters and variables, by path."""
        dtypes = {name: p.dtype for name, p in self.parameters.items()}
        self.parameters |= {n: jnp.asarray(a, dtypes[n], copy=True) for n, a in arrays.items() if n in dtypes}
        self.rest = self.with_others(self.rest, {name: a for name, a in arrays.items() if name not in dtypes})

    def arrays_now(self) -> dict[str, np.ndarray]:
        """The parameters by path."""
        return {name: np.array(array) for name, array in self.parameters.items()}

    def as_gradients(self, arrays: Arrays) -> dict[str, jax.Array]:
        """Arrays by path, as `update` takes them."""
        return {name: jnp.asarray(arrays[name], p.dtype, copy=True) for name, p in self.parameters.items()}

    def scale_like(self, scale: float) -> None:
        """Multiply the loss by a number from here on, if it is scaled at all."""
        if isinstance(self.state, LossScaleState):
            self.state = self.state._replace(scale=jnp.asarray(scale, jnp.float32))

    def schedule_from(self, count: int) -> None:
        """Let optax's own schedules go on from a count."""

        def counted(node: Any) -> Any:
            return node._replace(count=jnp.asarray(count, node.count.dtype)) if scheduled(node) else node

        self.state = jax.tree.map(counted, self.state, is_leaf=scheduled)
