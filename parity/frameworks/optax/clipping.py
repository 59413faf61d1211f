"""Gradient clipping in torch's arithmetic."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def clip_grad_norm(max_norm: float, norm_type: float) -> optax.GradientTransformation:
    """`torch.nn.utils.clip_grad_norm_`: the norm of the norms of all gradients, and 1e-6 beside it in the denominator."""

    def update(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        norms = [jnp.linalg.norm(leaf.ravel(), norm_type) for leaf in jax.tree.leaves(updates) if leaf.size]
        if not norms:
            return updates, state
        coefficient = jnp.minimum(max_norm / (jnp.linalg.norm(jnp.stack(norms), norm_type) + 1e-6), 1.0)
        return jax.tree.map(lambda leaf: leaf * coefficient.astype(leaf.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def clip_grad_value(clip_value: float) -> optax.GradientTransformation:
    """`torch.nn.utils.clip_grad_value_`, which is optax's own."""
    return optax.clip(clip_value)
