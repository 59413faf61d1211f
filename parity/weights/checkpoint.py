"""Checkpoint files as source and target of a transfer: which kind, under which names, and replaced in one step."""

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parity.errors import InputError, TransferError
from parity.frameworks import load
from parity.weights import msgpack_file, safetensors_file
from parity.weights.claims import claimed
from parity.weights.files import Contents, Side, Slot, Tree, below, beside, nested, remove, same_bits, unwritable, weights_of
from parity.weights.leaf import DTYPES, PASSING, Layer, Leaf
from parity.weights.naming import derived, side
from parity.weights.pairing import room_of
from parity.weights.paths import natural
from parity.weights.shards import NUMBERED, Sharded, listed_shards


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint.

    Attributes:
        name: what errors call it.
        side: whose names it holds; None if it may be either's.
        read: opens one.
        write: writes one to a path; returns the further files that it made.
        dtypes: names of the dtypes that it can hold.
        ties: whether it can say that two names are one array.
        metadata: whether it has a place for text of its own.
        tree: whether its names are branches of a tree.
        indexed: whether the file is an index of others.
    """

    name: str
    side: Side | None
    read: Callable[[Path], Contents]
    write: Callable[[Path, list[Slot], Mapping[str, np.ndarray], Mapping[str, str]], list[Path]]
    dtypes: tuple[str, ...] = tuple(DTYPES)
    ties: bool = False
    metadata: bool = False
    tree: bool = False
    indexed: bool = False


def torch_tensors(path: Path) -> tuple[dict[str, Leaf], dict[str, str]]:
    """Every tensor of one file of torch.save by its name; such a file has no metadata."""
    return {leaf.path: leaf for leaf in load("torch.files").read(path).leaves}, {}


def torch_contents(found: dict[str, Leaf], metadata: dict[str, str], path: Path) -> Contents:
    """The tensors of several files of torch.save, in natural order."""
    return Contents(tuple(found[name] for name in sorted(found, key=natural)), "torch")


SHARDS = Sharded(".safetensors", safetensors_file.tensors, safetensors_file.contents, safetensors_file.write)
TORCH_SHARDS = Sharded(".bin", torch_tensors, torch_contents, lambda *given: load("torch.files").write(*given), names_ties=True)
CODES = tuple(safetensors_file.CODES)
SAFETENSORS = Format("safetensors", None, safetensors_file.read, safetensors_file.write, CODES, ties=True, metadata=True)
SHARDED = Format("safetensors in shards", None, SHARDS.read, SHARDS.write, CODES, ties=True, metadata=True, indexed=True)
TORCH_SHARDED = Format("torch.save in shards", "torch", TORCH_SHARDS.read, TORCH_SHARDS.write, ties=True, indexed=True)
MSGPACK = Format("Flax msgpack", "flax", msgpack_file.read, msgpack_file.write, tree=True)
TORCH = Format(
    "torch.save",
    "torch",
    lambda path: load("torch.files").read(path),
    lambda *given: load("torch.files").write(*given),
    ties=True,
)
ORBAX = Format(
    "Orbax",
    "flax",
    lambda path: load("nnx.orbax").read(path),
    lambda *given: load("nnx.orbax").write(*given),
    metadata=True,
    tree=True,
)
INDEX = ".safetensors.index.json"
INDEXES = {INDEX: SHARDED, ".bin.index.json": TORCH_SHARDED}
SUFFIXES = {".safetensors": SAFETENSORS, ".msgpack": MSGPACK, ".orbax": ORBAX}
SUFFIXES |= dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), TORCH)
LIKE = "give the names of the target with like (--like)"
KINDS = f"{', '.join(SUFFIXES)}, *{', *'.join(INDEXES)}, or a folder"


def check_name(path: Path) -> None:
    """Refuse what cannot be the name of a file or folder here.

    Raises:
        InputError: it is too long, holds a character that is not allowed, or lies where nobody may look.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        # Told in better words by whoever wants to read it, or to write there.
        return
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{str(path)!r} cannot be used: {reason}; check the path", "file-unreadable") from error


def is_path(value: Any) -> bool:
    """Whether a source or target is the path of a checkpoint."""
    return isinstance(value, str | os.PathLike)


def located(path: Path, *, source: bool) -> tuple[Format, Path]:
    """The kind of a checkpoint, and the file that stands for it.

    Raises:
        InputError: the path says no kind, or a folder holds none or several.
    """
    for end, kind in INDEXES.items():
        if path.name.endswith(end):
            return kind, path
    if path.suffix in SUFFIXES and not (source and path.is_dir() and path.suffix != ".orbax"):
        return SUFFIXES[path.suffix], path
    if source and path.is_dir():
        return in_folder(path)
    if source and not path.exists():
        raise InputError(f"{path} does not exist; check the path", "file-missing")
    if path.suffix and not path.is_dir():
        raise InputError(f"{path.name} says no kind of checkpoint by its end; known are {KINDS}", "file-unreadable")
    return SHARDED, path / f"model{INDEX}"


def in_folder(path: Path) -> tuple[Format, Path]:
    """What lies in a folder: an index file, a single file, or Orbax's files; safetensors before all others.

    Raises:
        InputError: it holds no checkpoint or several, or only some of the shards of one.
    """
    found: list[Path] = []
    for ends in (
        [INDEX],
        [".safetensors"],
        [".bin.index.json"],
        [end for end in SUFFIXES if end not in (".safetensors", ".orbax")],
    ):
        found = [file for file in sorted(path.iterdir()) if file.is_file() and any(file.name.endswith(end) for end in ends)]
        if found:
            break
    lonely = [file.name for file in found if (of := NUMBERED.search(file.stem)) and int(of[2]) > 1]
    if lonely:
        raise InputError(
            f"{path} holds {', '.join(lonely[:4])} without the index that says what belongs together; fetch it too",
            "file-missing",
        )
    if len(found) == 1:
        return located(found[0], source=True)
    # Imported only if nothing else explains the folder.
    if not found and load("nnx.orbax").checkpoint_in(path):
        return ORBAX, path
    names = ", ".join(file.name for file in found or sorted(path.iterdir())[:5]) or "nothing"
    raise InputError(
        f"{path} holds {names}; a folder must hold one *{INDEX} with its shards, one .safetensors file, "
        "or an Orbax checkpoint: give the path of the file that is meant",
        "file-unreadable",
    )


class Source(Tree):
    """An opened checkpoint.

    Args:
        path: where.
        key: the part of it that is meant, where it holds more than one model's weights.

    Raises:
        InputError: it is of no known kind, damaged, would run code, or has nothing under the key.
    """

    def __init__(self, path: Path, key: str = ""):
        check_name(path)
        self.format, self.path = located(path, source=True)
        if self.format is TORCH:
            self.contents = load("torch.files").read(self.path, key)
        else:
            found = self.format.read(self.path)
            self.contents = below(found, key, self.path) if key else weights_of(found, self.path)
        self.NAME, self.notes, self.metadata = self.contents.side, self.contents.notes, self.contents.metadata

    def leaves(self, value: Any) -> list[Leaf]:
        """Every array, a tied one under each of its names."""
        return list(self.contents.leaves)


class Target(Tree):
    """A checkpoint that is to be written.

    Args:
        path: where.
        source: what it is written from: a model, a tree or an opened checkpoint.
        like: a model, tree or checkpoint whose names, shapes and dtypes it takes on; None derives
            them from the source.
        rename: as for `transfer`.
        ignore: as for `transfer`.
        overwrite: whether an existing checkpoint is replaced.
        verify: whether it is read back and compared before it takes its place.

    Raises:
        InputError: the path says no kind of checkpoint, or `like` has names that it cannot hold.
    """

    def __init__(
        self, path: Path, source: Any, like: Any, rename: Any, ignore: Iterable[str], *, overwrite: bool, verify: bool
    ):
        check_name(path)
        self.format, self.path = located(path, source=False)
        self.given, self.overwrite, self.verify = path, overwrite, verify
        room = room_of(source, "source")
        # Sources whose names on the other side are not certain, each with the reason.
        self.unnamed: dict[str, str] = {}
        # Those of the model that gives the names: they decide as they would if it were filled itself.
        self.known: list[Layer] = []
        if like is None:
            self.NAME = self.format.side or side(room)
            leaves = claimed(room.leaves(source), room.layers(source))
            self.found, self.unnamed = derived(leaves, side(room), self.NAME, rename, ignore)
        else:
            other = room_of(like, "like")
            self.NAME, self.found = side(other), [leaf for leaf in other.leaves(like) if leaf.role not in PASSING]
            self.known = other.layers(like)
        if self.format.side not in (None, self.NAME):
            wanted, got = ("PyTorch", "Flax") if self.format.side == "torch" else ("Flax", "PyTorch")
            raise InputError(f"{self.path.name} is to hold {wanted}'s names, but like has {got}'s; give one with {wanted}'s")
        if not self.format.ties:
            self.found = [dataclasses.replace(leaf, identity=leaf.path) for leaf in self.found]
        self.found = [dataclasses.replace(leaf, new=True) for leaf in self.found]
        kept = source.metadata if isinstance(source, Tree) else {}
        # What says whose names these are is told anew.
        self.metadata = {k: v for k, v in kept.items() if k != "format"} if self.format.metadata else {}
        lost = ", ".join(sorted(set(kept) - set(self.metadata) - {"format"}))
        reason = f"metadata left out, for {self.format.name} has no place for it"
        self.notes = (f"{self.path.name}: {reason}: {lost}",) if lost else ()

    def leaves(self, value: Any) -> list[Leaf]:
        """Every array that it is to hold."""
        return self.found

    def layers(self, value: Any) -> list[Layer]:
        """The layers of the model whose names it takes on; none where that is no model."""
        return self.known

    def slots(self, paths: Iterable[str]) -> list[Slot]:
        """What is to be written, given which leaves something arrives for: tied names together."""
        arriving, groups = set(paths), dict[Any, list[Leaf]]()
        for leaf in self.found:
            groups.setdefault(leaf.identity, []).append(leaf)
        found = []
        for group in groups.values():
            # The name for which an array arrives comes first: it is asked for by that.
            names = sorted((leaf.path for leaf in group), key=lambda path: path not in arriving)
            if names[0] in arriving:
                found.append(Slot(tuple(names), group[0].shape, self.dtypes[names[0]]))
        return found

    def refusals(self, value: Any, dtypes: Mapping[str, str]) -> list[str]:
        """Why the file cannot be written, before anything is read; one sentence each."""
        self.dtypes = dtypes
        place = [problem for problem in (self.occupied(), self.folder()) if problem]
        if self.unnamed:
            place.append(f"{len(self.unnamed)} names on the other side are not certain; {LIKE}")
        unknown = sorted(set(dtypes.values()) - set(self.format.dtypes))
        if unknown:
            return [*place, f"{self.format.name} has no dtype {', '.join(unknown)}; write another kind of file, or cast"]
        slots = self.slots(dtypes)
        if self.format is ORBAX:
            place += load("nnx.orbax").refusals(slots)
        place += unwritable(name for slot in slots for name in slot.paths)
        return place + (nested(name for slot in slots for name in slot.paths) if self.format.tree else []) + self.full(slots)

    def occupied(self) -> str:
        """Why what stands there is not replaced, '' if nothing does or it may be."""
        if self.path.is_symlink():
            return f"{self.path} is a link to {os.readlink(self.path)}; give the path of the file itself, or another name"
        if self.format is SHARDED and self.given != self.path and (others := self.others()):
            return f"{self.given} holds {', '.join(others[:4])} already, a checkpoint of another name; give another folder"
        if not self.path.exists():
            return ""
        if self.path.is_dir() and not (self.format is ORBAX and load("nnx.orbax").is_tree(self.path)):
            return f"{self.path} is a folder that holds no such checkpoint, and is not replaced; give another name"
        if self.path.is_dir() and (others := load("nnx.orbax").strangers(self.path)):
            return f"{self.path} holds {', '.join(others[:4])}, which is not Orbax's, and is not replaced; give another name"
        if self.format is ORBAX and not self.path.is_dir():
            return f"{self.path} is a file, and an Orbax checkpoint is a folder; give another name"
        do = "pass overwrite=True (--overwrite) to replace it, or give another name"
        return "" if self.overwrite else f"{self.path} exists; {do}"

    def others(self) -> list[str]:
        """Checkpoints in the folder that is to become one, other than the one to be replaced."""
        files = sorted(self.given.iterdir()) if self.given.is_dir() else []
        old = [self.path, *listed_shards(self.path)] if self.path.exists() else []
        ends = (INDEX, ".safetensors")
        return [f.name for f in files if f not in old and f.name.endswith(ends) and not NUMBERED.search(f.stem)]

    def folder(self) -> str:
        """Why the folder takes no new file, '' if it does."""
        folder = self.path.parent
        if folder == self.given and not folder.exists():
            # A folder of shards is made on the way.
            folder = folder.parent
        if not folder.is_dir():
            return f"there is no folder {folder}; make it first"
        return "" if os.access(folder, os.W_OK | os.X_OK) else f"the folder {folder} cannot be written into; give another one"

    def full(self, slots: list[Slot]) -> list[str]:
        """Why the disk has no room; at most one sentence."""
        folder = self.path.parent if self.path.parent.is_dir() else self.path.parent.parent
        needed = sum(slot.bytes for slot in slots)
        free = shutil.disk_usage(folder).free if folder.is_dir() else needed
        return [f"{self.path} takes {needed:,} bytes and {folder} has {free:,} left; make room there"] if needed > free else []

    def fill(self, value: Any, arrays: Mapping[str, np.ndarray]) -> tuple[Path, set[str]]:
        """Write the file beside its place, compare it if asked to, and put it there.

        Raises:
            InputError: the disk is full, or what was read back is not what was written.
        """
        kind = {"format": "pt" if self.NAME == "torch" else "flax"} if self.format.metadata else {}
        metadata = {**self.metadata, **kind}
        before = listed_shards(self.path) if self.format.indexed and self.path.exists() else []
        made = self.format.indexed and not self.path.parent.exists()
        further: list[Path] = []
        try:
            with beside(self.path) as temporary:
                slots = self.slots(arrays)
                further = self.format.write(temporary, slots, arrays, metadata)
                if self.verify:
                    compare(self.format.read(temporary), slots, arrays, self.path)
                if problem := self.occupied():
                    # Somebody else was faster.
                    raise TransferError(problem, [problem])
        except BaseException:
            for file in further:
                remove(file)
            if made:
                # Only if nobody put anything else there.
                with contextlib.suppress(OSError):
                    self.path.parent.rmdir()
            raise
        for file in set(before) - set(further):
            remove(file)
        return self.given, set()


def compare(written: Contents, slots: list[Slot], arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Compare what was read back with the source, bit for bit.

    Raises:
        TransferError: they differ.
    """
    found = {leaf.path: leaf for leaf in written.leaves}
    wrong = [slot.paths[0] for slot in slots if not all(p in found for p in slot.paths)]
    wrong = wrong or [slot.paths[0] for slot in slots if not same_bits(found[slot.paths[0]].read(), arrays[slot.paths[0]])]
    if wrong:
        raise TransferError(
            f"{path} was read back and is not what was written, at {', '.join(wrong[:4])}; it is as it was before: "
            "check the disk and the memory of this machine",
            wrong,
        )
