"""Orbax folders, read leaf by leaf."""

import asyncio
import contextlib
import ctypes
import fnmatch
import glob
import logging
import math
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.type_handlers import NumpyHandler, create_type_handler_registry

from parity.errors import InputError, first_line
from parity.weights.files import Contents, Slot, flax_leaf, remove
from parity.weights.leaf import DTYPES
from parity.weights.paths import natural

# One of these lies in a folder that holds a tree of arrays.
MARKS = ("_METADATA", "manifest.ocdbt")
# Under what name the weights are saved beside other items, such as an optimizer's.
ITEMS = ("default", "state", "train_state", "params", "model", "pytree", "variables")
# All that Orbax puts into the folder of a tree; the last one is a pattern.
OWN: tuple[str, ...] = (
    "_METADATA",
    "_CHECKPOINT_METADATA",
    "_sharding",
    "_strings.json",
    "manifest.ocdbt",
    "commit_success.txt",
)
OWN += ("array_metadatas", "d", "ocdbt.process_*")


# One thread for all reads: each new one would keep memory of its own.
READER = ThreadPoolExecutor(1, thread_name_prefix="parity-orbax")


def is_tree(path: Path) -> bool:
    """Whether a folder holds a tree of arrays as Orbax writes it."""
    return any((path / mark).exists() for mark in MARKS)


def strangers(path: Path) -> list[str]:
    """What lies in a folder and is not Orbax's."""
    others = [file for file in sorted(path.iterdir()) if not any(fnmatch.fnmatchcase(file.name, own) for own in OWN)]
    # Without OCDBT each array has a folder of its own.
    return [file.name for file in others if not ((file / ".zarray").exists() or (file / "zarr.json").exists())]


def checkpoint_in(path: Path) -> Path | None:
    """The tree of arrays in a folder: the folder itself, or of a step of a CheckpointManager the item with the weights.

    Raises:
        InputError: there are several steps or items, and none is the one to take.
    """
    if is_tree(path):
        return path
    folders = [child for child in sorted(path.iterdir()) if child.is_dir()] if path.is_dir() else []
    items = [child for child in folders if is_tree(child)]
    steps = [child for child in folders if re.search(r"(^|[_-])\d+$", child.name) and step_holds(child)]
    if steps:
        names = sorted((step.name for step in steps), key=natural)
        such = f"give the folder of the one that is meant, such as {path / names[-1]}"
        raise InputError(f"{path} holds steps: {', '.join(names)}; {such}", "file-unreadable")
    chosen = items if len(items) == 1 else [child for child in items if child.name in ITEMS]
    if len(chosen) == 1 or not items:
        return chosen[0] if chosen else None
    found = ", ".join(child.name for child in items)
    raise InputError(
        f"{path} holds items: {found}; give the folder of the one that is meant, such as {items[0]}", "file-unreadable"
    )


def step_holds(path: Path) -> bool:
    return is_tree(path) or any(is_tree(child) for child in path.iterdir() if child.is_dir())


def read(path: Path) -> Contents:
    """Open an Orbax folder, or the item with the weights in one.

    Raises:
        InputError: it is none, or is damaged.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; check the path", "file-missing")
    folder = checkpoint_in(path) or path
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    try:
        with quiet():
            found = checkpointer.metadata(folder.resolve())
        item = found.item_metadata
        if item is None:
            raise ValueError("nothing says which arrays it holds, as in folders of old versions; save it anew with Orbax")
        tree, own = item.tree, item.custom_metadata or {}
        with quiet():
            stored = dict(walk(located(folder.resolve(), tree)))
    except Exception as error:
        # Orbax reports damage by many types, AttributeError among them.
        raise InputError(
            f"{path} is no Orbax checkpoint, or is damaged: {first_line(error)}; fetch or write it again", "file-unreadable"
        ) from error
    metadata = {str(key): value for key, value in own.items() if isinstance(value, str)}
    leaves, others = [], []
    for keys, entry in walk(tree):
        if is_array(entry):
            read_leaf = reader(stored[keys], f"{'.'.join(keys)} of {folder}")
            leaves.append(flax_leaf(keys, tuple(entry.shape), str(np.dtype(entry.dtype)), (str(path), keys), read_leaf))
        else:
            others.append(".".join(keys))
    notes = [f"{path.name}: no arrays, so left out: {', '.join(others)}"] if others else []
    if folder != path:
        beside = [child.name for child in sorted(path.iterdir()) if child != folder and is_tree(child)]
        left = f"; left out: {', '.join(beside)}" if beside else ""
        notes.append(f"{path.name}: the weights are the item {folder.name!r}{left}")
    return Contents(tuple(leaves), "flax", metadata, tuple(notes))


def walk(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from walk(value, (*keys, str(key)))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from walk(value, (*keys, str(index)))
    else:
        yield keys, tree


def is_array(entry: Any) -> bool:
    """Whether what Orbax tells of a leaf is of an array or a number."""
    return hasattr(entry, "shape") and hasattr(entry, "dtype") and entry.dtype is not None


class Stored:
    """An array in a folder of Orbax's that has not been read."""

    def __init__(self, info: Any, wanted: Any):
        self.info, self.wanted = info, wanted

    def read(self) -> np.ndarray:
        """The array itself."""
        give_back()
        # In a thread of its own: in a notebook this one has a loop that is running.
        return READER.submit(asyncio.run, NumpyHandler().deserialize([self.info], [self.wanted])).result()[0]


def give_back() -> None:
    """Return freed memory to the system: glibc keeps what TensorStore's threads freed, array upon array."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim:
        trim(0)


class Finder(NumpyHandler):
    """Tells where arrays are stored: Orbax's own handler reads all of them at once."""

    async def deserialize(self, infos: Any, args: Any = None) -> list[Any]:
        """One `Stored` for each array."""
        return [Stored(info, wanted) for info, wanted in zip(infos, args, strict=True)]


def located(folder: Path, tree: Any) -> Any:
    """The tree with a `Stored` in the place of each array, found in one pass over the folder."""
    wanted = [is_array(entry) for _, entry in walk(tree)]
    structure = jax.tree.structure(plain(tree))
    item = jax.tree.unflatten(structure, [0 if one else ocp.PLACEHOLDER for one in wanted])
    ways = jax.tree.unflatten(structure, [ocp.RestoreArgs(restore_type=Stored)] * len(wanted))
    return ocp.Checkpointer(handled_by(Stored, Finder())).restore(
        folder, args=ocp.args.PyTreeRestore(item=item, restore_args=ways)
    )


def plain(tree: Any) -> Any:
    """The tree's dicts and lists, in the order of `walk`, with a number at each leaf."""
    if isinstance(tree, Mapping):
        return OrderedDict((key, plain(value)) for key, value in tree.items())
    return [plain(value) for value in tree] if isinstance(tree, list | tuple) else 0


def reader(stored: Stored, name: str) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        try:
            with quiet():
                return np.asarray(stored.read())
        except Exception as error:
            raise InputError(
                f"{name} cannot be read: {first_line(error)}; fetch or write it again", "file-unreadable"
            ) from error

    return read


def handled_by(kind: type, handler: NumpyHandler) -> ocp.PyTreeCheckpointHandler:
    """What writes and reads trees whose leaves are of one kind."""
    return ocp.PyTreeCheckpointHandler(type_handler_registry=create_type_handler_registry((kind, handler)))


class Later:
    """An array that is made when Orbax is about to write it."""

    def __init__(self, slot: Slot, arrays: Mapping[str, np.ndarray], writer: "OneByOne"):
        self.path, self.arrays, self.writer = slot.paths[0], arrays, writer
        self.shape, self.dtype, self.ndim = slot.shape, DTYPES[slot.dtype], len(slot.shape)
        self.size = math.prod(slot.shape)
        self.nbytes = slot.bytes

    def read(self) -> np.ndarray:
        """The array itself."""
        if self.writer.stopped:
            raise CancelledError
        try:
            return self.arrays[self.path]
        except BaseException as error:
            # Orbax would wrap it up in one of its own.
            self.writer.error = error
            raise


class OneByOne(NumpyHandler):
    """Writes large arrays one after the other: Orbax's own handler takes all of them at once.

    Attributes:
        stopped: whether no further array is to be written.
        error: what was raised when an array was made.
    """

    # Bytes of small arrays that are written together.
    TOGETHER = 8 << 20

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self.stopped = False
        self.error: BaseException | None = None

    async def _background_serialize(self, values: Any, infos: Any, args: Any = None) -> None:
        begin = 0
        while begin < len(values):
            end, size = begin + 1, values[begin].nbytes
            while end < len(values) and size + values[end].nbytes <= self.TOGETHER:
                size += values[end].nbytes
                end += 1
            made = [value.read() for value in values[begin:end]]
            await super()._background_serialize(made, infos[begin:end], args[begin:end])
            begin = end


def write(path: Path, slots: list[Slot], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> list[Path]:
    """Write a folder that Orbax restores as a tree of dicts, one array after the other; tied arrays under each name."""
    tree: dict[str, Any] = {}
    writer = OneByOne()
    for slot in slots:
        for name in slot.paths:
            *branch, last = name.split(".")
            node = tree
            for key in branch:
                node = node.setdefault(key, {})
            node[last] = Later(slot, arrays, writer)
    try:
        with quiet(), ocp.Checkpointer(handled_by(Later, writer)) as checkpointer:
            try:
                checkpointer.save(path.resolve(), args=ocp.args.PyTreeSave(tree, custom_metadata=dict(metadata)))
            finally:
                # After an interrupt its threads must not go on in a folder that is being taken away.
                writer.stopped = True
    except Exception as error:
        if writer.error is not None:
            raise writer.error from None
        if isinstance(error, OSError):
            raise
        # TensorStore reports a full disk by ValueError, Orbax by several types.
        raise OSError(first_line(error)) from error
    finally:
        for left in path.parent.glob(f"{glob.escape(path.name)}.orbax-checkpoint-tmp*"):
            remove(left)
    return []


def refusals(slots: list[Slot]) -> list[str]:
    """What Orbax cannot hold; one sentence each."""
    empty = [slot.paths[0] for slot in slots if not slot.bytes]
    have = "has" if len(empty) == 1 else "have"
    return (
        [f"{', '.join(empty)} {have} no elements, and Orbax stores no empty arrays; write another kind of file"]
        if empty
        else []
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Orbax from telling on stderr what it is doing, and what its threads raised: that comes as an error too."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
