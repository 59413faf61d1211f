"""`torch.amp.GradScaler` as a transformation around another."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class LossScaleState(NamedTuple):
    """What a GradScaler keeps.

    Attributes:
        scale: by which the loss is to be multiplied.
        growth_tracker: steps since the scale last changed.
        skipped: whether the last step was.
        inner: the state of the transformation inside.
    """

    scale: jax.Array
    growth_tracker: jax.Array
    skipped: jax.Array
    inner: Any


def scaled(
    inner: optax.GradientTransformation,
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    growth_tracker: int = 0,
) -> optax.GradientTransformation:
    """Steps on gradients of a loss that was multiplied by the scale in the state.

    Where a gradient is not finite nothing moves and the inner state stays, save for the counts of optax's own
    schedules: in a torch loop the scheduler goes on where the optimizer's step is skipped.
    """

    def init(params: Any) -> LossScaleState:
        return LossScaleState(
            jnp.asarray(init_scale, jnp.float32), jnp.asarray(growth_tracker, jnp.int32), jnp.asarray(False), inner.init(params)
        )

    def update(updates: Any, state: LossScaleState, params: Any = None) -> tuple[Any, LossScaleState]:
        gradients = jax.tree.map(lambda g: g * jnp.reciprocal(state.scale).astype(g.dtype), updates)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)] or [jnp.asarray(True)]).all()
        # NaN must not get into what is thrown away: gradients may flow through an update.
        safe = jax.tree.map(lambda g: jnp.where(finite, g, 0), gradients)
        moved, new = inner.update(safe, state.inner, params)
        kept = jax.tree.map(lambda n, o: n if scheduled(n) else jnp.where(finite, n, o), new, state.inner, is_leaf=scheduled)
        grown = state.growth_tracker + 1 == growth_interval
        larger = state.scale * np.float32(growth_factor)
        up = jnp.where(grown & jnp.isfinite(larger), larger, state.scale)
        scale = jnp.where(finite, up, state.scale * np.float32(backoff_factor))
        tracker = jnp.where(finite & ~grown, state.growth_tracker + 1, 0)
        return jax.tree.map(lambda u: jnp.where(finite, u, 0), moved), LossScaleState(scale, tracker, ~finite, kept)

    return optax.GradientTransformation(init, update)


def scheduled(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def found(state: Any) -> LossScaleState | None:
    """The first loss scale in a state, None if there is none."""
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, LossScaleState))
    return next((leaf for leaf in leaves if isinstance(leaf, LossScaleState)), None)


def loss_scale(state: Any) -> jax.Array:
    """The number by which the loss is to be multiplied; 1 in a state without a loss scale."""
    here = found(state)
    return jnp.ones([], jnp.float32) if here is None else here.scale
