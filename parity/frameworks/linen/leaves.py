"""Linen models and variables as leaves and layers, and how new ones are made."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import meta

from parity.frameworks.linen.structure import Part, other_words, part_by_name
from parity.frameworks.nnx.leaves import make_leaf, model_dtype_of, place, received, wide_refusals
from parity.linen import Linen
from parity.weights.files import COLLECTIONS
from parity.weights.leaf import Layer, Leaf, Role
from parity.weights.paths import natural

NAME = "flax"


def is_model(value: Any) -> bool:
    return isinstance(value, Linen)


def owns(value: Any) -> bool:
    """Whether `value` is a `parity.Linen`, or variables: a tree of mappings with arrays in it, of jax or in collections."""
    if is_model(value) or not isinstance(value, Mapping) or not value:
        return is_model(value)
    arrays = list(branches(value))
    known = any(name in COLLECTIONS for name in value) or any(isinstance(a, JAX) for a in arrays)
    return known and all(isinstance(a, JAX) or type(a).__module__ == "numpy" for a in arrays)


# What a tree has in the place of an array; boxes such as `nn.Partitioned` hold one.
JAX = (jax.Array, jax.ShapeDtypeStruct, meta.AxisMetadata)


def branches(tree: Mapping[Any, Any]) -> Iterator[Any]:
    """What a tree of mappings holds."""
    for value in tree.values():
        if isinstance(value, Mapping):
            yield from branches(value)
        else:
            yield value


def kinds(model: Any) -> tuple[str, ...]:
    """Public names of the classes of a model's module, nearest first."""
    return model.structure.parts[()].kinds


def variables_of(value: Any) -> Any:
    return value.variables if is_model(value) else value


def flat(variables: Any) -> dict[tuple[str, ...], Any]:
    """Arrays by their keys; what a box such as `nn.Partitioned` holds stands in its place."""
    found, _ = jax.tree_util.tree_flatten_with_path(variables, is_leaf=is_box)
    return {tuple(map(key_name, keys)): unboxed(leaf) for keys, leaf in found}


def is_box(value: Any) -> bool:
    return isinstance(value, meta.AxisMetadata)


def unboxed(value: Any) -> Any:
    while is_box(value):
        # Not by its own unbox, which would also put a constraint on the array.
        (value,) = jax.tree.leaves(value, is_leaf=lambda one, box=value: is_box(one) and one is not box)
    return value


def key_name(key: Any) -> str:
    """A key of jax's in words."""
    return str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))


def apart(keys: tuple[str, ...], collections: bool) -> tuple[str, ...]:
    """A leaf's keys without its collection."""
    return keys[1:] if collections and len(keys) > 1 else keys


def role_of(keys: tuple[str, ...], collections: bool, array: Any) -> Role:
    if jnp.issubdtype(getattr(array, "dtype", "float32"), jax.dtypes.prng_key):
        return "random state"
    return "parameter" if not collections or keys[0] == "params" else "buffer"


def leaves(value: Any) -> list[Leaf]:
    """Every array: of a model in the order of the modules' calls where that is known, otherwise by name."""
    variables = variables_of(value)
    collections = any(name in COLLECTIONS for name in variables)
    structure = value.structure.parts if is_model(value) else {}
    order = {path: number for number, path in enumerate(structure)}
    found = []
    for keys, array in flat(variables).items():
        inner = apart(keys, collections)
        part = part_of(inner[:-1], structure) if is_model(value) else unknown_part(inner[:-1])
        path = ".".join(keys)
        leaf = make_leaf(path, part.words, keys[-1], part.kinds, role_of(keys, collections, array), path, array)
        # In the order in which torch has them: parameters before statistics, the bias behind what it is added to.
        place = (order.get(inner[:-1], len(order)), keys[0] != "params", keys[-1] == "bias", natural(path))
        found.append((place, replace(leaf, also=part.also, by_name=part.by_name)))
    return [leaf for _, leaf in sorted(found, key=lambda one: one[0])]


def part_of(path: tuple[str, ...], structure: Mapping[tuple[str, ...], Part]) -> Part:
    """The module of a path; of one that was not met what the names tell, below the nearest that was."""
    if path in structure:
        return structure[path]
    guess = part_by_name(path)
    above = next(structure[path[:n]] for n in range(len(path), -1, -1) if path[:n] in structure)
    rest = ".".join(path[len(above.path) :])
    words = ".".join(filter(None, (above.words, rest)))
    also = other_words((words, guess.words, *(f"{one}.{rest}" for one in above.also if one)))
    # A class that is told by a name may be that of a layer further up.
    told = any(part_by_name(path[:n]).kinds for n in range(len(above.path) + 1, len(path) + 1))
    return replace(guess, words=words, also=also, by_name=told)


def unknown_part(path: tuple[str, ...]) -> Part:
    words = ".".join(path)
    return Part(path, (), {}, words, other_words((words,)))


def layers(value: Any) -> list[Layer]:
    """Every module under its path in torch's words, the root as ''."""
    if not is_model(value):
        return []
    parts = dict(value.structure.parts)
    for keys in flat(value.variables):
        # Layers of which only the names tell, all the way up: they may claim what lies in them.
        for length in range(1, len(keys) - 1):
            path = keys[1 : 1 + length]
            if path not in parts:
                parts[path] = replace(part_of(path, value.structure.parts), by_name=True)
    return [
        Layer(
            *(part.words, part.kinds, setting_reader(part), own_path(part.path), part.also, part.by_name), setting_names(part)
        )
        for part in parts.values()
    ]


def setting_names(part: Part) -> Callable[[], list[str]]:
    """Lists what a module was made with, and what is derived from it."""
    return lambda: [*part.settings, *DERIVED]


def own_path(path: tuple[str, ...]) -> str:
    return ".".join(("params", *path))


def setting_reader(part: Part) -> Callable[[str], Any]:
    def read(name: str) -> Any:
        value = part.settings.get(name, part.settings.get(DERIVED.get(name, "")))
        if name == "dtype" and value is not None:
            return str(jnp.dtype(value))
        return value

    return read


# What NNX keeps beside what Linen has in one setting.
DERIVED = {"num_kv_heads": "num_heads"}


def fill(value: Any, arrays: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """A new model or new variables with other arrays; types, tree and boxes as they were.

    Args:
        value: the target; it stays as it is.
        arrays: by path; NumPy arrays are copied, `Shared` ones keep their memory where jax can.

    Returns:
        The new model or variables, and the paths whose memory is shared.
    """
    variables = variables_of(value)
    targets = {".".join(keys): array for keys, array in flat(variables).items()}
    new, done = received(arrays, lambda path: place(targets[path]))

    def put(keys: Any, old: Any) -> Any:
        path = ".".join(map(key_name, keys))
        return boxed(old, new[path]) if path in new else old

    made = jax.tree_util.tree_map_with_path(put, variables, is_leaf=is_box)
    return (value.replaced(variables=made) if is_model(value) else made), done


def boxed(old: Any, array: Any) -> Any:
    """An array in the box of another one."""
    if not is_box(old):
        return array
    inner, tree = jax.tree.flatten(old, is_leaf=lambda one: is_box(one) and one is not old)
    return jax.tree.unflatten(tree, [boxed(inner[0], array)])


def refusals(value: Any, dtypes: Mapping[str, str]) -> list[str]:
    """Why arrays of these dtypes, by path, cannot be held; one sentence each."""
    return wide_refusals(dtypes)


def model_dtype(model: Any) -> str | None:
    """The dtype of the floating point parameters, None if there are none."""
    return model_dtype_of(leaves(model))
