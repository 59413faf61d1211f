"""What the kinds of checkpoint files have in common: their contents, whose names they hold, and replacing one safely."""

import contextlib
import ctypes
import dataclasses
import errno
import json
import math
import mmap
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

import numpy as np

from parity.errors import InputError
from parity.weights.leaf import DTYPES, Leaf
from parity.weights.paths import spellings, split
from parity.weights.plan import unconfirmed

Side = Literal["torch", "flax"]

# Last names that only one framework's layers give.
TORCH_ONLY = ("weight", "running_mean", "running_var", "in_proj_weight")
FLAX_ONLY = ("kernel", "scale", "embedding")
# The first key of Flax's variables names a collection, not a layer.
COLLECTIONS = ("params", "batch_stats", "cache", "intermediates")
# Bytes that may stay mapped after they were read: the file is not to count twice against memory.
MAPPED = 8 << 20
# Bytes in the name of a file, as nearly every file system has it.
LONGEST_NAME = 255
# NumPy's limit.
MOST_AXES = 64
# Rows and columns that are turned over together.
TILE = 64


class Tree:
    """Names and arrays without layers, in the place of a framework's room.

    Attributes:
        NAME: `torch` or `flax`: whose names these are.
        metadata: text that came with them.
        notes: what a reader of the plan must know of them; one sentence each.
    """

    NAME: Side
    metadata: Mapping[str, str] = MappingProxyType({})
    notes: tuple[str, ...] = ()

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
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


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
    """A leaf of a file of Flax's."""
    return in_flax_words(make_leaf(".".join(keys), shape, dtype, identity, read), keys)


def in_flax_words(leaf: Leaf, keys: tuple[str, ...]) -> Leaf:
    """The leaf of a file whose names are Flax's: a collection in front and `value` behind are no part of the layer's name."""
    inner = keys
    # A TrainState made of whole variables has its params in the params.
    for _ in range(2):
        inner = inner[1:] if inner[0] in COLLECTIONS and len(inner) > 1 else inner
    if len(inner) > 1 and inner[-1] == "value":
        # nnx.State as Orbax writes it.
        inner = inner[:-1]
    owner = ".".join(inner[:-1])
    return dataclasses.replace(leaf, owner=owner, name=inner[-1], also=tuple(spellings(owner)))


def side_of(names: Iterable[str], metadata: Mapping[str, str]) -> tuple[Side, str]:
    """Whose names these are, and what says so."""
    declared = {"pt": "torch", "torch": "torch", "flax": "flax", "jax": "flax"}.get(metadata.get("format", ""))
    if declared:
        return ("torch" if declared == "torch" else "flax"), f"its metadata says format={metadata['format']}"
    last = {split(name)[1] for name in names}
    if not last & set(TORCH_ONLY) and last & set(FLAX_ONLY):
        return "flax", f"they end in {', '.join(sorted(last & set(FLAX_ONLY)))}"
    return "torch", "nothing says that they are Flax's" if not last & set(TORCH_ONLY) else "they end in weight"


def below(contents: Contents, key: str, path: Path) -> Contents:
    """The part of a checkpoint whose names begin with a key, without it.

    Raises:
        InputError: no name begins so.
    """
    start = f"{key}."
    found = [leaf for leaf in contents.leaves if leaf.path.startswith(start)]
    if not found:
        tops = dict.fromkeys(leaf.path.partition(".")[0] for leaf in contents.leaves)
        raise InputError(
            f"{path} has nothing under the key {key!r}; at its top it has {', '.join(tops) or 'nothing'}", "file-unreadable"
        )
    return dataclasses.replace(contents, leaves=tuple(renamed(leaf, leaf.path.removeprefix(start), contents) for leaf in found))


def renamed(leaf: Leaf, path: str, contents: Contents) -> Leaf:
    if contents.side == "flax":
        return flax_leaf(tuple(path.split(".")), leaf.shape, leaf.dtype, leaf.identity, leaf.read)
    owner, name = split(path)
    return dataclasses.replace(leaf, path=path, owner=owner, name=name)


def weights_of(contents: Contents, path: Path) -> Contents:
    """What a model takes of a training state: its collections of variables, without the optimizer and the step."""
    tops = list(dict.fromkeys(leaf.path.partition(".")[0] for leaf in contents.leaves))
    states = [top for top in tops if any(leaf.path.startswith(f"{top}.opt_state.") for leaf in contents.leaves)]
    if len(states) == 1:
        inner = below(contents, states[0], path)
        others = ", ".join(top for top in tops if top != states[0])
        note = f"{path.name}: the training state is under {states[0]!r}{f'; left out: {others}' if others else ''}"
        return weights_of(dataclasses.replace(inner, notes=(*inner.notes, note)), path)
    if "params" not in tops or "opt_state" not in tops:
        return contents
    left = [top for top in tops if top not in COLLECTIONS]
    note = f"{path.name} is a training state; left out: {', '.join(left)} (key says what else is meant)"
    leaves = tuple(leaf for leaf in contents.leaves if leaf.path.partition(".")[0] in COLLECTIONS)
    return dataclasses.replace(contents, leaves=leaves, notes=(*contents.notes, note))


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
    start = start.lstrip(b"\xef\xbb\xbf \t\r\n") or start
    marks = (
        (b"PK\x03\x04", "; it is a zip archive, as torch.save writes: name it .pt"),
        (b"\x80\x02", "; it is a pickle, as old versions of torch.save write: name it .pt"),
        (b"\x80", "; it is a pickle, and loading that would run code: ask its author for safetensors"),
        *(
            (mark, "; it is compressed: unpack it first")
            for mark in (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf")
        ),
        (b"GGUF", "; it is a GGUF file, as llama.cpp reads: fetch the weights that it was made from"),
        (b"\x93NUMPY", "; it is a single array of NumPy's: save a dict of arrays"),
        (b"{", "; it is JSON, perhaps an index or what a server answered: fetch the file itself"),
        (b"version https://git-lfs", "; it is a git-lfs pointer in place of the file: run git lfs pull"),
        (b"<", "; it is a web page or XML: download the file itself"),
        (b"\x89HDF", "; it is an HDF5 file, as Keras writes: convert it there first"),
    )
    return next((words for mark, words in marks if start.startswith(mark)), "")


def impossible(shape: tuple[int, ...], dtype: str) -> str:
    """Why no array has this shape, '' if one can."""
    if len(shape) > MOST_AXES:
        return f"has {len(shape)} axes, and {MOST_AXES} are the most"
    # NumPy multiplies what is left when axes without elements are passed over.
    size = math.prod(size or 1 for size in shape) * DTYPES[dtype].itemsize
    return f"has shape {shape}, which no computer can hold" if size >= 2**63 else ""


def unwritable(names: Iterable[str]) -> list[str]:
    """Names that no file can hold, because they are no text; one sentence each."""
    found = []
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            found.append(f"{name!r} is no valid text (a lone surrogate), and cannot stand in a file; rename it")
    return found


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
        raise InputError(
            f"{path} is no rename file: it is no valid JSON ({error}); save one to see its form", "file-unreadable"
        ) from error
    if not isinstance(found, dict):
        raise InputError(
            f"{path} is no rename file: it holds a {type(found).__name__}, not an object from names to names", "file-unreadable"
        )
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
        raise InputError(f"{path} cannot be read: {error.strerror}; check the path", "file-unreadable") from error
    if not size:
        raise InputError(f"{path} is empty (0 bytes); fetch or write it again", "file-unreadable")
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

    The folder is made if only that is missing. After an error, or when the process is killed, `path` is as it was.

    Raises:
        InputError: the disk is full or does not allow it.
    """
    name = f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    temporary = path.with_name(name if len(os.fsencode(name)) <= LONGEST_NAME else f".{secrets.token_hex(8)}.partial")
    try:
        path.parent.mkdir(exist_ok=True)
        yield temporary
        sync(temporary)
        replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise InputError(
            f"{path} could not be written: {error.strerror or error}; it is as it was before", "file-unwritable"
        ) from error
    finally:
        remove(temporary)


def replace(temporary: Path, path: Path) -> None:
    """Put what was written in the place of what stands there; afterwards `temporary` may be the old one."""
    if not path.is_dir():
        os.replace(temporary, path)
        return
    try:
        exchange(temporary, path)
    except OSError:
        # Where folders cannot change places there is none for a moment.
        old = temporary.with_suffix(".old")
        os.rename(path, old)
        try:
            os.rename(temporary, path)
        except BaseException:
            os.rename(old, path)
            raise
        shutil.rmtree(old)


def exchange(one: Path, other: Path) -> None:
    """Let two folders change places in one step, as Linux can.

    Raises:
        OSError: this system or file system cannot.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    # RENAME_EXCHANGE, with both paths seen from the current folder.
    if call is None or call(-100, os.fsencode(one), -100, os.fsencode(other), 2):
        number = ctypes.get_errno() if call else errno.ENOSYS
        raise OSError(number, os.strerror(number))


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
    if array.dtype in (np.float32, np.float64):
        # A NaN is its own maximum; a signalling one is what is looked for, nothing to warn of.
        with np.errstate(invalid="ignore"):
            return int(np.isnan(array).sum()) if np.isnan(array.max()) else 0
    limit = NAN_LIMITS.get(array.dtype.name)
    if limit is not None:
        width = 8 * array.dtype.itemsize
        # Comparing bits as integers needs no memory: above infinity's bits there is nothing but NaN.
        if array.view(f"i{width // 8}").max() <= limit and array.view(f"u{width // 8}").max() <= limit + (1 << (width - 1)):
            return 0
    with np.errstate(invalid="ignore"):
        return int(np.isnan(array).sum())


# The bits of infinity, or of the largest number where there is no infinity.
NAN_LIMITS = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float8_e4m3fn": 0x7E,
    "float8_e5m2": 0x7C,
}
