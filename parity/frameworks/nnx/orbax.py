"""Orbax folders, read leaf by leaf."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from parity.errors import InputError, first_line
from parity.weights.files import Contents, Slot, flax_leaf

MARKS = ("_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA")


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is what Orbax writes."""
    return any((path / mark).exists() for mark in MARKS)


def read(path: Path) -> Contents:
    """Open an Orbax folder; a step of a CheckpointManager's is looked for under `default` too.

    Raises:
        InputError: it is none, or is damaged.
    """
    folder = next((found for found in (path, path / "default", path / "state") if (found / "_METADATA").exists()), path)
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    try:
        with quiet():
            found = checkpointer.metadata(folder.resolve())
        item = found.item_metadata
        tree, own = item.tree, item.custom_metadata or {}
    except Exception as error:
        # Orbax reports damage by many types, AttributeError among them.
        raise InputError(
            f"{path} is no Orbax checkpoint, or is damaged: {first_line(error)}; fetch or write it again"
        ) from error
    metadata = {str(key): value for key, value in own.items() if isinstance(value, str)}
    leaves, others = [], []
    for keys, entry in walk(tree):
        if hasattr(entry, "shape") and hasattr(entry, "dtype") and entry.dtype is not None:
            read_leaf = reader(checkpointer, folder.resolve(), tree, keys)
            leaves.append(flax_leaf(keys, tuple(entry.shape), str(np.dtype(entry.dtype)), (str(path), keys), read_leaf))
        else:
            others.append(".".join(keys))
    notes = (f"{path.name}: no arrays, so left out: {', '.join(others)}",) if others else ()
    return Contents(tuple(leaves), "flax", metadata, notes)


def walk(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from walk(value, (*keys, str(key)))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from walk(value, (*keys, str(index)))
    else:
        yield keys, tree


def only(tree: Any, keys: tuple[str, ...]) -> Any:
    """The tree with placeholders for all but one leaf: what is behind those is not read."""
    if isinstance(tree, Mapping):
        return {key: only(value, keys[1:] if keys and str(key) == keys[0] else ()) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [only(value, keys[1:] if keys and str(i) == keys[0] else ()) for i, value in enumerate(tree)]
    return ocp.PLACEHOLDER


def reader(checkpointer: Any, folder: Path, tree: Any, keys: tuple[str, ...]) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        item = only(tree, keys)
        node = item
        for key in keys[:-1]:
            node = node[int(key)] if isinstance(node, list) else node[matching(node, key)]
        last: Any = int(keys[-1]) if isinstance(node, list) else matching(node, keys[-1])
        node[last] = 0
        wanted = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        try:
            with quiet():
                found = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(item=item, restore_args=wanted))
        except Exception as error:
            raise InputError(
                f"{'.'.join(keys)} of {folder} cannot be read: {first_line(error)}; fetch or write it again"
            ) from error
        for key in keys:
            found = found[int(key)] if isinstance(found, list | tuple) else found[matching(found, key)]
        return np.asarray(found)

    return read


def matching(node: Mapping[Any, Any], key: str) -> Any:
    """The key itself, where it may be a number."""
    return next(own for own in node if str(own) == key)


def write(path: Path, slots: list[Slot], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> list[Path]:
    """Write a folder that Orbax restores as a tree of dicts; tied arrays under each name.

    Orbax takes the tree whole, so that all arrays that had to be converted are in memory at once.
    """
    tree: dict[str, Any] = {}
    for slot in slots:
        array = arrays[slot.paths[0]]
        for name in slot.paths:
            *branch, last = name.split(".")
            node = tree
            for key in branch:
                node = node.setdefault(key, {})
            node[last] = array
    try:
        with quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(path.resolve(), args=ocp.args.PyTreeSave(tree, custom_metadata=dict(metadata)))
    except Exception as error:
        # TensorStore reports a full disk by ValueError, Orbax by several types.
        raise OSError(first_line(error)) from error
    return []


def refusals(slots: list[Slot]) -> list[str]:
    """What Orbax cannot hold; one sentence each."""
    empty = [slot.paths[0] for slot in slots if not slot.bytes]
    return (
        [f"{', '.join(empty)} has no elements, and Orbax stores no empty arrays; write another kind of file"] if empty else []
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Orbax from telling on stderr what it is doing."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
