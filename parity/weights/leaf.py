"""What every framework is reduced to: arrays under dotted paths, read when they are needed."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np

# Every dtype that an array may have on its way, by name.
DTYPES: dict[str, np.dtype] = {
    **{name: np.dtype(name) for name in ("float64", "float32", "float16", "complex64", "complex128", "bool")},
    **{f"{sign}int{width}": np.dtype(f"{sign}int{width}") for sign in ("", "u") for width in (8, 16, 32, 64)},
    **{
        name: np.dtype(getattr(ml_dtypes, name))
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    },
}


@dataclass(frozen=True)
class Shared:
    """An array that speaks DLPack, and the permutation of its axes that the reader has to make."""

    array: Any
    axes: tuple[int, ...]


Role = Literal["parameter", "buffer", "random state", "run state"]

# What a model does not own for good: it has no counterpart elsewhere and never travels.
PASSING = ("random state", "run state")


@dataclass(frozen=True)
class Part:
    """Where a leaf lies in an array of which it is only a part: arrays are cut into equal blocks of rows.

    Attributes:
        whole: dotted path of the array.
        number: which block, from 0.
        count: how many there are.
    """

    whole: str
    number: int
    count: int

    def of(self, array: np.ndarray) -> np.ndarray:
        """This block of the whole array, as a view."""
        rows = array.shape[0] // self.count
        return array[self.number * rows : (self.number + 1) * rows]


@dataclass(frozen=True)
class Claim:
    """A layer further up whose row in the ledger names an array that a layer inside it holds.

    Attributes:
        owner: dotted path of that layer, in torch's words.
        name: the array's name below it, such as `query.kernel`.
        kinds: of that layer.
    """

    owner: str
    name: str
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """One array of a model or tree, not yet read.

    Attributes:
        path: dotted path in the framework's own words, such as `model.layers.0.kernel`.
        owner: dotted path of the layer that holds it, in torch's words: without the
            `layers` of an `nnx.Sequential`. Empty at the root.
        name: the array's name in its layer, such as `kernel`.
        kinds: public names of the layer's classes along its MRO; empty in a tree of arrays.
        shape: its shape.
        dtype: its dtype's name, such as `bfloat16`.
        role: random state, and what a run leaves behind, has no counterpart elsewhere and never travels.
        identity: equal for two leaves exactly if they are one array under two names.
        read: the array as NumPy, not to be written into; it may share the model's memory.
        share: the array with its axes permuted, lent where the framework can lend it, otherwise as NumPy.
        unreadable: why the array has no values that could be read; empty if it has.
        part: where it lies in the model's array, if it is only a part of that.
        claims: layers further up whose row names the array.
        from_file: whether it is read from a file.
        merged: paths of the arrays that it is computed from, if the model has no such array itself.
        loose: whether it may stay without counterpart, because it may be a constant that the model computed.
        new: whether it lies in a file that is still to be made, so that nothing stands in its place.
    """

    path: str
    owner: str
    name: str
    kinds: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    role: Role
    identity: Hashable
    read: Callable[[], np.ndarray] = field(compare=False, repr=False)
    share: Callable[[tuple[int, ...]], Shared | np.ndarray] = field(compare=False, repr=False)
    unreadable: str = ""
    part: Part | None = None
    claims: tuple[Claim, ...] = ()
    from_file: bool = False
    merged: tuple[str, ...] = ()
    loose: bool = False
    new: bool = False

    @property
    def array_path(self) -> str:
        """Dotted path of the model's array: the leaf's own, unless the leaf is only a part of it."""
        return self.part.whole if self.part else self.path

    def of(self, array: np.ndarray) -> np.ndarray:
        """What belongs to this leaf in an array of the shape of the model's."""
        return self.part.of(array) if self.part else array

    def cut(self, names: tuple[str, ...]) -> tuple["Leaf", ...]:
        """The leaf in as many equal blocks of rows as there are names: `weight[q]`, `weight[k]`, `weight[v]`."""
        return tuple(self.block(name, Part(self.path, number, len(names))) for number, name in enumerate(names))

    def block(self, name: str, part: Part) -> "Leaf":
        """One block of rows, under a name in brackets."""
        return replace(
            self,
            path=f"{self.path}[{name}]",
            name=f"{self.name}[{name}]",
            claims=tuple(replace(claim, name=f"{claim.name}[{name}]") for claim in self.claims),
            shape=(self.shape[0] // part.count, *self.shape[1:]),
            identity=(self.identity, part.number, part.count),
            read=lambda: part.of(self.read()),
            share=lambda axes: part.of(self.read()).transpose(axes),
            part=part,
        )


@dataclass(frozen=True)
class Layer:
    """One layer of a model, for its settings.

    Attributes:
        path: dotted path in torch's words.
        kinds: public names of its classes along the MRO.
        settings: its attributes.
        own_path: dotted path in the framework's own words.
    """

    path: str
    kinds: tuple[str, ...]
    settings: Callable[[str], Any] = field(compare=False, repr=False)
    own_path: str = ""


def gathered(arrays: list[tuple[Leaf, np.ndarray]]) -> dict[str, Any]:
    """Arrays of leaves by the path of the model's array; parts are put together again.

    Raises:
        ValueError: a part is missing.
    """
    whole: dict[str, Any] = {leaf.path: array for leaf, array in arrays if not leaf.part}
    parts: dict[str, dict[int, np.ndarray]] = {}
    counts: dict[str, int] = {}
    for leaf, array in arrays:
        if leaf.part:
            parts.setdefault(leaf.part.whole, {})[leaf.part.number] = array
            counts[leaf.part.whole] = leaf.part.count
    for path, blocks in parts.items():
        if len(blocks) < counts[path]:
            raise ValueError(f"{path} needs {counts[path]} parts, got {len(blocks)}")
        whole[path] = np.concatenate([blocks[number] for number in sorted(blocks)])
    return whole
