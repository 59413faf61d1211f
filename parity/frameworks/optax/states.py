"""States of the twins that `building` makes, wherever they lie: in a chain, in optax.MultiSteps, in nnx.Optimizer."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from parity.frameworks.optax.building import GROUP, dotted

# Arrays in states of optax's own parts, and what torch calls them.
FIELDS = {
    "trace": "momentum_buffer",
    "nu": "square_avg",
    "mu": "grad_avg",
    "e_g": "square_avg",
    "e_x": "acc_delta",
}


@dataclass(frozen=True)
class Place:
    """What a leaf of a state is.

    Attributes:
        group: the number of the parameter group.
        name: torch's name of it; `step` for a count.
        path: dotted path of the parameter, None for what belongs to the whole group.
    """

    group: int
    name: str
    path: str | None = None


def owns(value: Any) -> bool:
    """Whether a value is the state of a twin, or an nnx.Optimizer or a state of optax's in which there is one."""
    # A group whose rule keeps nothing is an empty state: no leaf, but its name is there.
    flat = jax.tree_util.tree_leaves_with_path(content(value), is_leaf=lambda x: isinstance(x, nnx.Variable | optax.EmptyState))
    return any(dotted((key,)).startswith(GROUP) for path, _ in flat for key in path)


def content(value: Any) -> Any:
    return value.opt_state if isinstance(value, nnx.Optimizer) else value


def is_variable(value: Any) -> bool:
    return isinstance(value, nnx.Variable)


def places(value: Any) -> list[tuple[tuple[Any, ...], Place | None, Any]]:
    """Every leaf of a state with its key path and what it is, None for what is no twin's."""
    flat = jax.tree_util.tree_leaves_with_path(content(value), is_leaf=is_variable)
    return [(path, place_of(path), leaf) for path, leaf in flat]


def place_of(path: tuple[Any, ...]) -> Place | None:
    names = [dotted((key,)) for key in path]
    start = next((i for i, name in enumerate(names) if name.startswith(GROUP)), None)
    if start is None:
        return None
    group, rest = int(names[start].removeprefix(GROUP)), start + 1
    for i in range(rest, len(path)):
        if not isinstance(path[i], jax.tree_util.GetAttrKey):
            continue
        if names[i] == "count":
            return Place(group, "step")
        if names[i] in ("tensors", "scalars"):
            return Place(group, names[i + 1], dotted(path[i + 2 :]) if names[i] == "tensors" else None)
        if names[i] in FIELDS:
            return Place(group, FIELDS[names[i]], dotted(path[i + 1 :]))
    return None


def value_of(leaf: Any) -> Any:
    return leaf.get_value() if is_variable(leaf) else leaf


@dataclass(frozen=True)
class Found:
    """A twin's state.

    Attributes:
        tensors: by parameter path and torch's name.
        scalars: by group and torch's name.
        counts: updates so far, by group; empty where nothing is counted.
    """

    tensors: dict[str, dict[str, np.ndarray]]
    scalars: dict[int, dict[str, float]]
    counts: dict[int, int]


def read_state(value: Any) -> Found:
    """The state of a twin, as NumPy.

    Args:
        value: what `init` or `update` of the transformation gave, or an nnx.Optimizer.
    """
    found = Found({}, {}, {})
    for _, place, leaf in places(value):
        array = value_of(leaf)
        if place is None or not hasattr(array, "dtype"):
            continue
        if place.name == "step":
            found.counts[place.group] = int(array)
        elif place.path is not None:
            found.tensors.setdefault(place.path, {})[place.name] = np.asarray(array)
        else:
            found.scalars.setdefault(place.group, {})[place.name] = float(array)
    return found


def write_state(value: Any, new: Found) -> Any:
    """A state with new values; an nnx.Optimizer is filled in place, a state comes back new."""
    flat, structure = jax.tree_util.tree_flatten_with_path(content(value), is_leaf=is_variable)
    leaves = []
    for path, leaf in flat:
        place, old = place_of(path), value_of(leaf)
        array = wanted(place, new) if place and hasattr(old, "dtype") else None
        # A copy of its own: jax may go on using the memory of a NumPy array.
        made = None if array is None else jnp.array(array, dtype=old.dtype, copy=True)
        if not is_variable(leaf):
            leaves.append(leaf if made is None else made)
        elif not isinstance(value, nnx.Optimizer):
            # What `init` makes of an nnx.State: the variables belong to the caller's state.
            leaves.append(leaf.replace(old if made is None else made))
        elif made is not None:
            leaf.set_value(made)
    if not isinstance(value, nnx.Optimizer):
        return jax.tree.unflatten(structure, leaves)
    value.step.set_value(jnp.asarray(max(new.counts.values(), default=0), jnp.uint32))
    return value


def wanted(place: Place, new: Found) -> Any:
    if place.name == "step":
        return new.counts.get(place.group)
    if place.path is not None:
        return new.tensors.get(place.path, {}).get(place.name)
    return new.scalars.get(place.group, {}).get(place.name)
