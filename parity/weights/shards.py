"""Checkpoints in several files with an index: read as if they were one, and replaced so that no half of one is ever seen.

Source:
    https://huggingface.co/docs/safetensors/index and `transformers`, which share one form of index for
    safetensors and for files of torch.save
"""

import dataclasses
import glob
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from parity.errors import InputError, listed
from parity.weights.files import Contents, Slot, looks_like, once, size_of, sync
from parity.weights.leaf import Leaf
from parity.weights.paths import natural

# Bytes in one file.
SHARD = 5_000_000_000
NUMBERED = re.compile(r"-(\d{5})-of-(\d{5})$")

Read = Callable[[Path], tuple[dict[str, Leaf], dict[str, str]]]
Write = Callable[[Path, list[Slot], Mapping[str, np.ndarray], Mapping[str, str]], list[Path]]


@dataclass(frozen=True)
class Sharded:
    """Files of one kind under one index.

    Attributes:
        end: the end of each file's name.
        tensors: opens one of them: its arrays by name, and its metadata.
        contents: arrays of all of them, the metadata and the path of the index as one checkpoint.
        write_one: writes one of them.
        names_ties: whether each name of a tied array stands in the files, and so in the index.
    """

    end: str
    tensors: Read
    contents: Callable[[dict[str, Leaf], dict[str, str], Path], Contents]
    write_one: Write
    names_ties: bool = False

    def read(self, path: Path) -> Contents:
        """Open every shard that an index file names.

        Raises:
            InputError: the index is damaged, names files that are missing or outside its folder, or disagrees with them.
        """
        index = parse_index(path)
        names, files = index["weight_map"], sorted(set(index["weight_map"].values()))
        outside = [file for file in files if not inside(file)]
        if outside:
            raise InputError(
                f"{path} names {', '.join(outside)}, outside its folder; a shard must lie beside its index", "file-unreadable"
            )
        missing = [file for file in files if not (path.parent / file).is_file()]
        if missing:
            raise InputError(
                f"{path} names {', '.join(missing)}, and {path.parent} has no such files; fetch them too", "file-missing"
            )
        found: dict[str, Leaf] = {}
        metadata: dict[str, str] = {}
        problems = []
        for file in files:
            shard, its_metadata = self.tensors(path.parent / file)
            metadata |= its_metadata
            strays = [name for name in shard if names.get(name) != file]
            problems += [f"{name} is in {file}, but the index has it in {names.get(name, 'no file')}" for name in strays]
            found |= shard
        problems += [f"{name} is not in {file}, where the index has it" for name, file in names.items() if name not in found]
        if problems:
            raise InputError(listed(f"{path} and its shards disagree, fetch them again", problems), "file-unreadable")
        given = index.get("metadata")
        own = {k: str(v) for k, v in given.items() if k != "total_size"} if isinstance(given, dict) else {}
        contents = self.contents(found, metadata | own, path)
        return dataclasses.replace(contents, notes=(*contents.notes, *self.beside(path, files)))

    def beside(self, path: Path, files: list[str]) -> list[str]:
        """What must be told of files that look like shards, but that the index does not name."""
        stems = {NUMBERED.sub("", file.removesuffix(self.end)) for file in files}
        others = [file.name for file in sorted(path.parent.glob(f"*{self.end}")) if file.name not in files]
        others = [name for name in others if NUMBERED.sub("", name.removesuffix(self.end)) in stems]
        return [f"{path.name}: not named by it, so not read: {', '.join(others)}"] if others else []

    def write(self, path: Path, slots: list[Slot], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> list[Path]:
        """Write shards beside an index file, under names that no file has yet, and return them.

        Until the index stands, nothing points at them; the shards of an older index stay.
        """
        groups, names, written = list(shards(slots)), dict[str, str](), list[Path]()
        # The index is written under a name that begins with a dot and its own name.
        stem, own, _ = path.name.removeprefix(".").partition(f"{self.end}.index.json")
        stem = stem if own and stem else "model"
        if any(path.parent.glob(f"{glob.escape(stem)}-*-of-*{self.end}")):
            stem = f"{stem}-{secrets.token_hex(3)}"
        try:
            for number, group in enumerate(groups, 1):
                file = path.parent / f"{stem}-{number:05}-of-{len(groups):05}{self.end}"
                written.append(file)
                self.write_one(file, group, arrays, metadata)
                sync(file)
                names |= {name: file.name for slot in group for name in slot.paths[: None if self.names_ties else 1]}
            total = {"total_size": sum(slot.bytes for slot in slots)}
            path.write_text(json.dumps({"metadata": total, "weight_map": names}, indent=2), encoding="utf-8")
        except BaseException:
            for file in written:
                file.unlink(missing_ok=True)
            raise
        return written


def parse_index(path: Path) -> dict[str, Any]:
    size_of(path)
    try:
        index = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        with path.open("rb") as file:
            known = looks_like(file.read(40))
        reason = f"it is no valid JSON ({error}){known or '; fetch or write it again'}"
        raise InputError(f"{path} is no index file: {reason}", "file-unreadable") from error
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise InputError(
            f"{path} is no index file: it has no weight_map from names to files; fetch or write it again", "file-unreadable"
        )
    return index


def inside(file: str) -> bool:
    # A link is followed: the cache of the Hugging Face hub is made of links.
    return "\\" not in file and ":" not in file and len(PurePosixPath(file).parts) == 1 and file not in (".", "..")


def shards(slots: list[Slot]) -> Iterator[list[Slot]]:
    """The arrays in files of at most `SHARD` bytes, in natural order."""
    group, size = list[Slot](), 0
    for slot in sorted(slots, key=lambda slot: natural(slot.paths[0])):
        if group and size + slot.bytes > SHARD:
            yield group
            group, size = [], 0
        group.append(slot)
        size += slot.bytes
    yield group


def listed_shards(path: Path) -> list[Path]:
    """The shards of an index file that is about to be replaced; none if it cannot be read."""
    try:
        return [path.parent / file for file in set(parse_index(path)["weight_map"].values()) if inside(file)]
    except InputError:
        return []
