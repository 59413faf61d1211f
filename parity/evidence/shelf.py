"""Arrays of a run put aside on disk, so that memory holds those of one module at a time."""

import tempfile
import weakref
from typing import Any, BinaryIO

import numpy as np

# Bytes that stay in memory: small models never touch the disk.
ROOM = 16 * 2**20
# So many times as much for a run that is compared while it comes in: what a layer is given waits for what it returns, and is
# gone then. Of an encoder with 100 million parameters that is 50 MiB (benchmarks/compare_scale.py).
PASSING = 3


class Shelf:
    """Puts arrays aside; they come back bit for bit.

    What does not fit into the room in memory goes to one temporary file without a name, which is gone with the shelf
    and all that lies on it. If the disk is full, arrays stay in memory. Room is free again once nobody has an array.

    Args:
        room: how many times `ROOM` it has.

    Attributes:
        held: bytes of the arrays that are in memory.
        written: bytes of those in the file.
    """

    def __init__(self, room: int = 1) -> None:
        self.room = room * ROOM
        self.held = self.written = 0
        self.file: BinaryIO | None = None

    def put(self, array: np.ndarray) -> "Shelved":
        """An array put aside, as it is now: who gave it may write into it afterwards, but nobody into one of jax."""
        if self.held + array.nbytes > self.room:
            start = self.write(np.ascontiguousarray(array))
            if start is not None:
                return Shelved(self, array.shape, array.dtype, start)
        self.held += array.nbytes
        kept = Shelved(self, array.shape, array.dtype, array=copied(array) if array.flags.writeable else array)
        weakref.finalize(kept, self.gone, array.nbytes)
        return kept

    def gone(self, size: int) -> None:
        """An array in memory that nobody has any more."""
        self.held -= size

    def write(self, array: np.ndarray) -> int | None:
        """Append an array to the file; returns where it begins, or None if it cannot be written."""
        start, rest = self.written, array.reshape(-1).view(np.uint8).data
        try:
            if self.file is None:
                self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open as long as something lies in it
                weakref.finalize(self, self.file.close)
            self.file.seek(start)
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError:
            return None
        self.written += array.nbytes
        return start

    def read(self, start: int, array: np.ndarray) -> None:
        """Fill an array with what lies in the file from `start` on."""
        assert self.file is not None
        rest = array.reshape(-1).view(np.uint8).data
        self.file.seek(start)
        while rest:
            rest = rest[self.file.readinto(rest) :]  # type: ignore[attr-defined]


class Shelved:
    """One array that was put aside.

    Args:
        shelf: where it lies.
        shape: of the array.
        dtype: of the array.
        start: its first byte in the file.
        array: itself, if it stayed in memory.
    """

    def __init__(self, shelf: Shelf, shape: tuple[int, ...], dtype: np.dtype, start: int = 0, array: np.ndarray | None = None):
        self.shelf, self.shape, self.dtype, self.start, self.array = shelf, shape, dtype, start, array

    def read(self) -> np.ndarray:
        """The array."""
        if self.array is not None:
            return self.array
        array = np.empty(self.shape, self.dtype)
        self.shelf.read(self.start, array)
        return array


def copied(array: np.ndarray) -> Any:
    """What is recorded stays in memory, as it is now."""
    return np.array(array)


def taken(leaf: Any) -> Any:
    """An array that was put aside; anything else is itself."""
    return leaf.read() if isinstance(leaf, Shelved) else leaf
