"""What a run dropped, drop by drop, and its file."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from parity.errors import InputError, listed

# How a mask is drawn for its input: each element its own; one for a whole channel; torch's AlphaDropout, which
# shifts what it drops; attention weights; between the layers of a recurrent one; anything else that draws a mask.
KINDS = ("element", "channels", "alpha", "alpha channels", "attention", "recurrent", "function")
FORMAT = "parity dropout masks 1"


@dataclass(frozen=True)
class Place:
    """One drop of a run without its numbers: equal runs have equal places. It has a hash.

    Attributes:
        path: of the innermost module that drops, in torch's words; '' for the model itself.
        call: which call of that module it is in, counted from 0.
        kind: one of `KINDS`.
        rate: probability that an element is dropped.
        scale: what kept elements are multiplied by; None where that is not known.
        shape: of the mask; axes that share a mask have length 1.
    """

    path: str
    call: int
    kind: str
    rate: float
    scale: float | None
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.path or 'the model'}, call {self.call}: {self.kind}, rate {self.rate:g}, shape {self.shape}"


@dataclass(frozen=True)
class Drop(Place):
    """One drop of a run: its place, and the mask in packed bits.

    Attributes:
        bits: eight elements a byte, as `numpy.packbits` has them; 1 keeps.
    """

    bits: np.ndarray = field(repr=False, compare=False)

    @property
    def mask(self) -> np.ndarray:
        """The mask: True keeps. A new array."""
        size = int(np.prod(self.shape, dtype=np.int64))
        return np.unpackbits(self.bits, count=size).astype(bool).reshape(self.shape)

    @property
    def place(self) -> Place:
        """The same without its numbers."""
        return Place(self.path, self.call, self.kind, self.rate, self.scale, self.shape)


class DropoutMasks:
    """The masks of a run, in the order in which they were drawn.

    Args:
        source: whose run it was: `torch` or `flax`.
        modules: of every module of its model, those that drop nothing too, the first path, in torch's words, by
            all paths that it has.
        convolutional: whether there are convolutions among them, before which Flax has the channels last.
        drops: what is known already.

    Attributes:
        drops: every drop.
    """

    def __init__(
        self, source: str, modules: Mapping[str, str] | None = None, convolutional: bool = False, drops: Iterable[Drop] = ()
    ):
        self.source, self.modules, self.convolutional = source, dict(modules or {}), convolutional
        self.drops: list[Drop] = list(drops)

    def __len__(self) -> int:
        return len(self.drops)

    def __repr__(self) -> str:
        kept = sum(int(np.bitwise_count(drop.bits).sum()) for drop in self.drops)
        total = sum(int(np.prod(drop.shape, dtype=np.int64)) for drop in self.drops)
        return f"DropoutMasks({self.source}, {len(self)} drops, {kept:,} of {total:,} elements kept)"

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"  {drop.place}" for drop in self.drops)])

    @property
    def plan(self) -> tuple[Place, ...]:
        """Where the run dropped, without numbers: equal for two runs that one compiled program can serve."""
        return tuple(drop.place for drop in self.drops)

    def arrays(self) -> dict[str, list[np.ndarray]]:
        """The masks as a pytree: for each path its masks in order, True keeps.

        Runs of one `plan` have pytrees of the same structure and shapes, so that a compiled
        function takes them as an argument and is compiled once.
        """
        found: dict[str, list[np.ndarray]] = {}
        for drop in self.drops:
            found.setdefault(drop.path, []).append(drop.mask)
        return found

    def add(self, path: str, call: int, kind: str, rate: float, scale: float | None, mask: np.ndarray) -> None:
        """Put one more drop on the record."""
        self.drops.append(Drop(path, call, kind, float(rate), scale, tuple(mask.shape), np.packbits(mask.astype(bool))))

    def scaled(self, number: int, scale: float) -> None:
        """Say what a drop multiplies by, once that is seen."""
        self.drops[number] = replace(self.drops[number], scale=scale)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: packed bits, and all else as JSON in its metadata.

        A file that is there already is replaced once the new one is whole.

        Args:
            path: of the file.

        Raises:
            InputError: it cannot be written; what was there is as it was.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        header = {
            "source": self.source,
            "modules": self.modules,
            "convolutional": self.convolutional,
            "drops": [[d.path, d.call, d.kind, d.rate, d.scale, d.shape] for d in self.drops],
        }
        target = Path(path)
        if target.exists() and not target.is_file():
            raise InputError(f"{path} is no file that could be replaced; give the path of a file")
        part = target.with_name(f"{target.name}.part")
        try:
            save_file(
                {str(number): drop.bits for number, drop in enumerate(self.drops)},
                part,
                {"format": FORMAT, "masks": json.dumps(header)},
            )
            part.replace(target)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} cannot be written: {error}; give a folder that exists and has room") from None
        finally:
            with contextlib.suppress(OSError):
                part.unlink()

    @staticmethod
    def load(path: str | Path) -> "DropoutMasks":
        """Read what `save` wrote. Nothing in the file is executed.

        Args:
            path: of the file.

        Raises:
            InputError: it is no such file, or does not hold what it says; all problems at once.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{path} cannot be read as dropout masks: {error}; give a file that masks.save wrote", "file-unreadable"
            ) from None
        if metadata.get("format") != FORMAT:
            raise InputError(
                f"{path} says it holds {metadata.get('format')!r}, expected {FORMAT!r}; give a file that masks.save wrote",
                "file-unreadable",
            )
        return read_header(path, metadata.get("masks", ""), arrays)


def read_header(path: Any, text: str, arrays: Mapping[str, np.ndarray]) -> DropoutMasks:
    """Masks of a file's metadata and arrays.

    Raises:
        InputError: they do not fit.
    """
    try:
        header = json.loads(text)
        drops = [
            Drop(str(p), int(c), str(k), float(r), None if s is None else float(s), tuple(map(int, shape)), arrays[str(number)])
            for number, (p, c, k, r, s, shape) in enumerate(header["drops"])
        ]
        modules = {str(way): str(first) for way, first in header["modules"].items()}
        masks = DropoutMasks(str(header["source"]), modules, bool(header["convolutional"]), drops)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is damaged: {type(error).__name__}: {error}; record the masks again", "file-unreadable"
        ) from None
    problems = [problem for number, drop in enumerate(drops) if (problem := unfit(number, drop))]
    if len(arrays) != len(drops):
        problems.append(f"it holds {len(arrays)} masks and tells of {len(drops)}")
    if problems:
        raise InputError(listed(f"{path} is damaged; record the masks again", problems), "file-unreadable")
    return masks


def unfit(number: int, drop: Drop) -> str:
    """Why a drop that was read is none, '' if it is one."""
    size = int(np.prod(drop.shape, dtype=np.int64))
    if drop.kind not in KINDS or not 0 <= drop.rate <= 1 or min(drop.shape, default=0) < 0:
        return f"mask {number} is no drop: {drop.place}"
    if drop.bits.dtype != np.uint8 or drop.bits.shape != ((size + 7) // 8,):
        return (
            f"mask {number} has {drop.bits.shape} {drop.bits.dtype} in place of {(size + 7) // 8} bytes for shape {drop.shape}"
        )
    return ""


def counted(places: Iterable[Place]) -> Counter[str]:
    """How many drops each path has."""
    return Counter(place.path for place in places)
