"""What the kinds of checkpoint files have in common: their contents, whose names they hold, and replacing one safely."""

import contextlib
import dataclasses
import json
import math
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from parity.errors import InputError
from parity.weights.leaf import DTYPES, Leaf
from parity.weights.paths import split
from parity.weights.plan import unconfirmed

Side = Literal["torch", "flax"]

# Last names that only one framework's layers give.
TORCH_ONLY = ("weight", "running_mean", "running_var", "in_proj_weight")
FLAX_ONLY = ("kernel", "scale", "embedding")
# The first key of Flax's variables names a collection, not a layer.
COLLECTIONS = ("params", "batch_stats", "cache", "intermediates")
# Bytes that may stay mapped after they were read: the file is not to count twice against memory.
MAPPED = 8 << 20
# Rows and columns that are turned over together.
TILE = 64


class Tree:
    """Names and arrays without layers, in the place of a framework's room.

    Attributes:
        NAME: `torch` or `flax`: whose names these are.
    """

    NAME: Side

    def leaves(self, value: Any) -> list[Leaf]:
        """Every array."""
        raise NotImplementedError

    def layers(self, value: Any) -> list[Any]:
        """None: a file does not know the layers that its arrays belong to."""
        return []


@dataclass(frozen=True)
class Contents:
    """What a checkpoint file holds; the arrays are read when they are needed.

    Attributes:
        leaves: its arrays, a tied one under each of its names.
        side: whose names they have.
        metadata: the file's own, as text.
        notes: what a reader of the plan must know of the file; one sentence each.
    """

    leaves: tuple[Leaf, ...]
    side: Side
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slot:
    """One array to be written.

    Attributes:
        paths: its names, the first one first; several for a tied array.
        shape: its shape.
        dtype: its dtype's name.
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


def make_leaf(
    path: str, shape: tuple[int, ...], dtype: str, identity: Hashable, read: Callable[[], np.ndarray], owner: str | None = None
) -> Leaf:
    """A leaf of a file; it is read as NumPy in every case, for a file has no memory to share."""
    own, name = split(path)
    own = owner if owner is not None else own
    return Leaf(
        path, own, name, (), shape, dtype, "parameter", identity, read, lambda axes: read().transpose(axes), from_file=True
    )


def flax_leaf(
    keys: tuple[str, ...], shape: tuple[int, ...], dtype: str, identity: Hashable, read: Callable[[], np.ndarray]
) -> Leaf:
    """A leaf of a file of Flax's: a collection in front and `value` behind are no part of the layer's name."""
    leaf = make_leaf(".".join(keys), shape, dtype, identity, read)
    inner = keys[1:] if keys[0] in COLLECTIONS and len(keys) > 1 else keys
    if len(inner) > 1 and inner[-1] == "value":
        # nnx.State as Orbax writes it.
        inner = inner[:-1]
    return dataclasses.replace(leaf, owner=".".join(inner[:-1]), name=inner[-1])


def side_of(names: Iterable[str], metadata: Mapping[str, str]) -> tuple[Side, str]:
    """Whose names these are, and what says so."""
    declared = {"pt": "torch", "torch": "torch", "flax": "flax", "jax": "flax"}.get(metadata.get("format", ""))
    if declared:
        return ("torch" if declared == "torch" else "flax"), f"its metadata says format={metadata['format']}"
    last = {split(name)[1] for name in names}
    if not last & set(TORCH_ONLY) and last & set(FLAX_ONLY):
        return "flax", f"they end in {', '.join(sorted(last & set(FLAX_ONLY)))}"
    return "torch", "nothing says that they are Flax's" if not last & set(TORCH_ONLY) else "they end in weight"


def nested(paths: Iterable[str]) -> list[str]:
    """Names that cannot stand in a tree, because one of them is both an array and a branch; one sentence each."""
    known = set(paths)
    return [
        f"{path} is an array and {path[:cut]} is one too; a tree cannot hold both, rename one of them"
        for path in known
        for cut in (i for i, letter in enumerate(path) if letter == ".")
        if path[:cut] in known
    ]


def looks_like(start: bytes) -> str:
    """What a file really is, judged by its first bytes, as the end of a sentence; '' if that cannot be told."""
    marks = (
        (b"PK\x03\x04", "; it is a zip archive, as torch.save writes: name it .pt"),
        (b"\x80\x02", "; it is a pickle, as old versions of torch.save write: name it .pt"),
        (b"version https://git-lfs", "; it is a git-lfs pointer in place of the file: run git lfs pull"),
        (b"<", "; it is a web page or XML: download the file itself"),
        (b"\x89HDF", "; it is an HDF5 file, as Keras writes: convert it there first"),
    )
    return next((words for mark, words in marks if start.startswith(mark)), "")


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands there twice")
    return found


def read_rename(path: Path) -> dict[str, str]:
    """A rename file: a JSON object from names to names.

    Raises:
        InputError: it is missing, or is something else.
    """
    if path.suffix != ".json":
        raise InputError(
            f"rename must be a mapping from names to names, got {str(path)!r}; or the path of a .json file with one"
        )
    size_of(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no rename file: it is no valid JSON ({error}); save one to see its form") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} is no rename file: it holds a {type(found).__name__}, not an object from names to names")
    if open_ := unconfirmed(found):
        raise InputError(
            f"{path} still has {len(open_)} suggestions that nobody confirmed, such as {open_[0]}; "
            "take the ? away where the name is right, and the whole entry where it is not"
        )
    return found


def size_of(path: Path) -> int:
    """The size of a file that must be there and hold something.

    Raises:
        InputError: there is no such file, it cannot be read, or it is empty.
    """
    try:
        with path.open("rb"):
            size = path.stat().st_size
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; check the path") from error
    if not size:
        raise InputError(f"{path} is empty (0 bytes); fetch or write it again")
    return size


class Mapped:
    """A file's bytes in the page cache, given out as arrays that no one can write into."""

    def __init__(self, path: Path):
        size_of(path)
        with path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.touched = 0

    def array(self, begin: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """The array that begins at a byte."""
        count = math.prod(shape)
        if not count:
            return np.empty(shape, DTYPES[dtype])
        size = count * DTYPES[dtype].itemsize
        if self.touched + size > MAPPED and hasattr(mmap, "MADV_DONTNEED"):
            # An array given out before stays good: its pages come back from the page cache if it is read again.
            self.data.madvise(mmap.MADV_DONTNEED)
            self.touched = 0
        self.touched += size
        return np.frombuffer(self.data, DTYPES[dtype], count, begin).reshape(shape)


def row_major(array: np.ndarray) -> Iterator[memoryview]:
    """An array's bytes in row-major order, piece by piece."""
    if array.ndim != 2 or array.flags.c_contiguous:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        return
    # In one call NumPy reads a transposed array four times slower: each line of the cache serves a single value.
    for top in range(0, array.shape[0], TILE):
        rows = array[top : top + TILE]
        band = np.empty(rows.shape, rows.dtype)
        for left in range(0, array.shape[1], TILE):
            band[:, left : left + TILE] = rows[:, left : left + TILE]
        yield band.reshape(-1).view(np.uint8).data


def put(file: BinaryIO, array: np.ndarray) -> None:
    """Write an array's bytes in row-major order."""
    for piece in row_major(array):
        file.write(piece)


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A name beside `path`; what stands there at the end has replaced `path`, in one step and safely on disk.

    After an error, or when the process is killed, `path` is as it was.

    Raises:
        InputError: the disk is full or does not allow it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        yield temporary
        sync(temporary)
        replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise InputError(f"{path} could not be written: {error.strerror or error}; it is as it was before") from error
    finally:
        remove(temporary)


def replace(temporary: Path, path: Path) -> None:
    if not path.is_dir():
        os.replace(temporary, path)
        return
    # No call replaces one filled folder by another: for a moment there is none.
    old = temporary.with_suffix(".old")
    os.rename(path, old)
    os.rename(temporary, path)
    shutil.rmtree(old)


def sync(path: Path) -> None:
    """Wait until a file, or every file of a folder, is on disk."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            flush(file)


def sync_folder(path: Path) -> None:
    # Not every file system can; the file itself is on disk already.
    with contextlib.suppress(OSError):
        flush(path)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are equal bit for bit, NaN and signs of zero included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    carrier = f"u{a.dtype.itemsize}" if a.dtype.itemsize <= 8 else None
    if carrier is None:
        return a.tobytes() == b.tobytes()
    return bool(np.array_equal(a.view(carrier), b.view(carrier)))


def count_nan(array: np.ndarray) -> int:
    """How many values are NaN; fast where none is."""
    if array.dtype.kind in "biu" or not array.size:
        return 0
    limit = NAN_LIMITS.get(array.dtype.name)
    if limit is not None:
        width = 8 * array.dtype.itemsize
        # Comparing bits as integers needs no memory: above infinity's bits there is nothing but NaN.
        if array.view(f"i{width // 8}").max() <= limit and array.view(f"u{width // 8}").max() <= limit + (1 << (width - 1)):
            return 0
    # A signalling NaN is what is looked for, nothing to warn of.
    with np.errstate(invalid="ignore"):
        return int(np.isnan(array).sum())


# The bits of infinity, or of the largest number where there is no infinity.
NAN_LIMITS = {
    "float64": 0x7FF0000000000000,
    "float32": 0x7F800000,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float8_e4m3fn": 0x7E,
    "float8_e5m2": 0x7C,
}
