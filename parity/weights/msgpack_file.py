"""Flax's msgpack files, walked through without loading an array and without running code.

Source:
    https://github.com/msgpack/msgpack/blob/master/spec.md and `flax.serialization`
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from parity.errors import InputError
from parity.weights.files import Contents, Mapped, Slot, flax_leaf, impossible, looks_like, put
from parity.weights.leaf import DTYPES, Leaf

NDARRAY, SCALAR = 1, 3
# flax.serialization cuts larger arrays into pieces, because a msgpack object ends at 4 GiB.
CHUNK = 2**30
CHUNKED = "__msgpack_chunked_array__"
DEEPEST = 64


class CorruptError(Exception):
    """What was found, where the format allows something else."""


@dataclass(frozen=True)
class Span:
    """Bytes that were passed over."""

    begin: int
    length: int


@dataclass(frozen=True)
class Stored:
    """An array that was passed over."""

    shape: tuple[int, ...]
    dtype: str
    begin: int


class Walk:
    """A walk through one file, from object to object."""

    SIZES: tuple[tuple[int, str], ...] = ((0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q"))
    SIZES += ((0xD0, ">b"), (0xD1, ">h"), (0xD2, ">i"), (0xD3, ">q"), (0xCA, ">f"), (0xCB, ">d"))
    LENGTHS: tuple[tuple[int, str, str], ...] = ((0xC4, ">B", "bin"), (0xC5, ">H", "bin"), (0xC6, ">I", "bin"))
    LENGTHS += ((0xD9, ">B", "str"), (0xDA, ">H", "str"), (0xDB, ">I", "str"))
    LENGTHS += ((0xC7, ">B", "ext"), (0xC8, ">H", "ext"), (0xC9, ">I", "ext"))
    LENGTHS += ((0xDC, ">H", "list"), (0xDD, ">I", "list"), (0xDE, ">H", "map"), (0xDF, ">I", "map"))

    def __init__(self, data: Any, position: int = 0, end: int | None = None):
        self.data, self.position = data, position
        self.end = len(data) if end is None else end

    def take(self, count: int) -> bytes:
        """The next bytes."""
        return bytes(self.data[self.skip(count) : self.position])

    def skip(self, count: int) -> int:
        """Pass over bytes; returns where they begin."""
        begin = self.position
        if count > self.end - begin:
            left = self.end - begin
            raise CorruptError(f"it is cut short: {count:,} bytes are announced at byte {begin:,}, and {left:,} are left")
        self.position += count
        return begin

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def value(self, depth: int = 0) -> Any:
        """The next object: a dict (lists too, by index), `Stored`, `Span`, text or a number."""
        if depth > DEEPEST:
            raise CorruptError(f"it is nested more than {DEEPEST} deep")
        mark = self.take(1)[0]
        if mark <= 0x7F or mark >= 0xE0:
            return mark if mark <= 0x7F else mark - 256
        if mark in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[mark]
        for code, form in self.SIZES:
            if mark == code:
                return self.number(form)
        kind, length = self.length(mark)
        if kind == "map":
            return self.mapping(length, depth)
        if kind == "list":
            return {str(index): self.value(depth + 1) for index in range(length)}
        if kind == "str":
            return self.text(length)
        if kind == "bin":
            return Span(self.skip(length), length)
        return self.extension(length, depth)

    def length(self, mark: int) -> tuple[str, int]:
        """What begins with this byte, and how long it is."""
        for first, last, kind in ((0x80, 0x8F, "map"), (0x90, 0x9F, "list"), (0xA0, 0xBF, "str")):
            if first <= mark <= last:
                return kind, mark - first
        if 0xD4 <= mark <= 0xD8:
            return "ext", 1 << (mark - 0xD4)
        for code, form, kind in self.LENGTHS:
            if mark == code:
                return kind, self.number(form)
        raise CorruptError(f"byte {self.position - 1:,} is {mark:#x}, with which nothing begins")

    def text(self, length: int) -> str:
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptError(f"text before byte {self.position:,} is not UTF-8") from error

    def mapping(self, length: int, depth: int) -> Any:
        found: dict[str, Any] = {}
        for _ in range(length):
            key = self.value(depth + 1)
            if not isinstance(key, str | int):
                raise CorruptError(f"a key before byte {self.position:,} is neither text nor a number")
            if str(key) in found:
                raise CorruptError(f"key {key!r} stands there twice")
            found[str(key)] = self.value(depth + 1)
        return found

    def extension(self, length: int, depth: int) -> Any:
        kind = self.number(">b")
        begin = self.skip(length)
        if kind not in (NDARRAY, SCALAR):
            # Python's complex numbers, or what Flax never writes.
            return Span(begin, length)
        inner = Walk(self.data, begin, begin + length).value(depth + 1)
        shape, dtype, span = (inner.get(key) for key in "012") if isinstance(inner, dict) else (None, None, None)
        if isinstance(dtype, Span):
            dtype = bytes(self.data[dtype.begin : dtype.begin + min(dtype.length, 32)]).decode("ascii", "replace")
        # How NumPy calls bfloat16 in files of older versions.
        dtype = "bfloat16" if dtype == "V2" else dtype
        if dtype not in DTYPES:
            raise CorruptError(f"an array at byte {begin:,} has dtype {dtype!r}, and only {', '.join(DTYPES)} are known")
        sizes = tuple(shape.values()) if isinstance(shape, dict) else None
        if sizes is None or not isinstance(span, Span) or not all(type(n) is int and n >= 0 for n in sizes):
            raise CorruptError(f"an array at byte {begin:,} has no shape or no values")
        wanted = int(np.prod(sizes, dtype=object)) * DTYPES[dtype].itemsize
        if wanted != span.length:
            raise CorruptError(f"an array at byte {begin:,} takes {wanted:,} bytes by its shape, but has {span.length:,}")
        if reason := impossible(sizes, dtype):
            raise CorruptError(f"an array at byte {begin:,} {reason}")
        return Stored(sizes, dtype, span.begin)


def read(path: Path) -> Contents:
    """Open a msgpack file of Flax's.

    Raises:
        InputError: it is not one, or is cut short.
    """
    data = Mapped(path)
    walk = Walk(data.data)
    try:
        tree = walk.value()
        if walk.position < walk.end:
            raise CorruptError(f"{walk.end - walk.position:,} bytes follow after its end")
        if not isinstance(tree, dict):
            raise CorruptError("it holds no tree of arrays")
        leaves: list[Leaf] = []
        others: list[str] = []
        collect(tree, (), data, leaves, others, path)
    except CorruptError as error:
        known = looks_like(bytes(data.data[:40]))
        raise InputError(
            f"{path} is no msgpack file of Flax's: {error}{known or '; fetch or write it again'}", "file-unreadable"
        ) from error
    notes = (f"{path.name}: no arrays, so left out: {', '.join(others)}",) if others else ()
    return Contents(tuple(leaves), "flax", {}, notes)


def collect(
    tree: dict[str, Any], keys: tuple[str, ...], data: Mapped, leaves: list[Leaf], others: list[str], path: Path
) -> None:
    """The arrays below a branch as leaves, everything else by name."""
    for key, value in tree.items():
        here = (*keys, key)
        if isinstance(value, dict) and CHUNKED in value:
            shape, dtype, parts = pieces(value)
            leaves.append(flax_leaf(here, shape, dtype, (str(path), here), joined(data, shape, parts)))
        elif isinstance(value, dict):
            collect(value, here, data, leaves, others, path)
        elif isinstance(value, Stored):
            leaves.append(flax_leaf(here, value.shape, value.dtype, (str(path), here), joined(data, value.shape, [value])))
        else:
            others.append(".".join(here))
    if not keys and len({leaf.path for leaf in leaves}) < len(leaves):
        names = [leaf.path for leaf in leaves]
        raise CorruptError(f"two arrays are called {next(name for name in names if names.count(name) > 1)}")


def pieces(value: dict[str, Any]) -> tuple[tuple[int, ...], str, list[Stored]]:
    """The shape, dtype and parts of an array that Flax cut into pieces."""
    shape, parts = value.get("shape"), value.get("chunks")
    sizes = tuple(shape.values()) if isinstance(shape, dict) else ()
    chunks = list(parts.values()) if isinstance(parts, dict) else []
    whole = bool(chunks) and all(isinstance(part, Stored) and part.dtype == chunks[0].dtype for part in chunks)
    if not whole or not all(type(n) is int and n >= 0 for n in sizes):
        raise CorruptError("an array in pieces has no shape, or its pieces are not alike")
    if sum(part.shape[0] if len(part.shape) == 1 else -1 for part in chunks) != int(np.prod(sizes, dtype=object)):
        raise CorruptError(f"the pieces of an array do not add up to its shape {sizes}")
    if reason := impossible(sizes, chunks[0].dtype):
        raise CorruptError(f"an array in pieces {reason}")
    return sizes, chunks[0].dtype, chunks


def joined(data: Mapped, shape: tuple[int, ...], parts: list[Stored]) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        found = [data.array(part.begin, part.shape, part.dtype) for part in parts]
        return (found[0] if len(found) == 1 else np.concatenate(found)).reshape(shape)

    return read


# ---------------------------------------------------------------- writing


def write(path: Path, slots: list[Slot], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> list[Path]:
    """Write a tree that `flax.serialization.msgpack_restore` reads, one array after the other; tied arrays under each name."""
    tree: dict[str, Any] = {}
    for slot in slots:
        for name in slot.paths:
            *branch, last = name.split(".")
            node = tree
            for key in branch:
                node = node.setdefault(key, {})
            node[last] = slot
    with path.open("wb") as file:
        write_branch(file, tree, arrays)
    return []


def write_branch(file: BinaryIO, tree: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    file.write(b"\xdf" + struct.pack(">I", len(tree)))
    for key, value in tree.items():
        file.write(text(key))
        if isinstance(value, dict):
            write_branch(file, value, arrays)
        elif value.bytes > CHUNK:
            write_pieces(file, arrays[value.paths[0]], value)
        else:
            write_array(file, arrays[value.paths[0]], value.dtype)


def write_pieces(file: BinaryIO, array: np.ndarray, slot: Slot) -> None:
    flat, step = np.ascontiguousarray(array).reshape(-1), CHUNK // array.dtype.itemsize
    parts = [flat[begin : begin + step] for begin in range(0, flat.size, step)]
    file.write(b"\x83" + text(CHUNKED) + b"\xc3" + text("shape") + b"\xdf" + struct.pack(">I", len(slot.shape)))
    for axis, size in enumerate(slot.shape):
        file.write(text(str(axis)) + b"\xcf" + struct.pack(">Q", size))
    file.write(text("chunks") + b"\xdf" + struct.pack(">I", len(parts)))
    for index, part in enumerate(parts):
        file.write(text(str(index)))
        write_array(file, part, slot.dtype)


def write_array(file: BinaryIO, array: np.ndarray, dtype: str) -> None:
    sizes = b"".join(b"\xcf" + struct.pack(">Q", size) for size in array.shape)
    inner = b"\x93" + b"\xdc" + struct.pack(">H", array.ndim) + sizes + text(dtype) + b"\xc6" + struct.pack(">I", array.nbytes)
    file.write(b"\xc9" + struct.pack(">Ib", len(inner) + array.nbytes, NDARRAY) + inner)
    put(file, array)


def text(words: str) -> bytes:
    data = words.encode()
    return b"\xdb" + struct.pack(">I", len(data)) + data
