"""Nested arguments and results: tuples, lists and mappings, without either framework."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """Named parts of a container, None for anything else."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", getattr(tree, name)) for name in tree._fields]
    if isinstance(tree, tuple | list):
        return [(f"[{index}]", part) for index, part in enumerate(tree)]
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", part) for key, part in tree.items()]
    if is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{f.name}", getattr(tree, f.name)) for f in fields(tree)]
    return None


def flatten(tree: Any, is_array: Callable[[Any], bool], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, such as `[0]['logits']`; the path of a lone leaf is ''."""
    parts = None if is_array(tree) else children(tree)
    if parts is None:
        yield path, tree
        return
    for name, part in parts:
        yield from flatten(part, is_array, path + name)


def mapped(change: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """A copy of nested tuples, lists, mappings and dataclasses, with every leaf changed.

    Args:
        change: gets a leaf's path and the leaf.
        tree: anything; what is none of them is a leaf.
        path: of the tree itself.
    """
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(change, getattr(tree, n), f"{path}.{n}") for n in tree._fields))
    if isinstance(tree, tuple | list):
        return type(tree)(mapped(change, part, f"{path}[{i}]") for i, part in enumerate(tree))
    if isinstance(tree, Mapping):
        return {key: mapped(change, part, f"{path}[{key!r}]") for key, part in tree.items()}
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [f.name for f in fields(tree) if f.init]
        return replace(tree, **{name: mapped(change, getattr(tree, name), f"{path}.{name}") for name in names})
    return change(path, tree)


def in_words(leaf: Any) -> str:
    """A leaf that is no array, in a few words: how an object of a foreign class prints itself tells no reader anything."""
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes | Enum):
        return repr(leaf)
    return f"an object of the class {type(leaf).__qualname__}, which cannot be compared"


def containers(args: Any, kwargs: Any) -> dict[str, tuple[tuple[str, int], ...]]:
    """For every list and mapping of a call's arguments the names and identities of its parts: what a model may change."""
    found: dict[str, tuple[tuple[str, int], ...]] = {}

    def walk(tree: Any, path: str) -> None:
        parts = children(tree) or []
        if isinstance(tree, list | Mapping):
            found[path] = tuple((name, id(part)) for name, part in parts)
        for name, part in parts:
            walk(part, path + name)

    for tree, path in ((args, "args"), *((value, f"kwargs[{name!r}]") for name, value in kwargs.items())):
        walk(tree, path)
    return found
