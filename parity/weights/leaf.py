"""What every framework is reduced to: arrays under dotted paths, read when they are needed."""

import hashlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from parity.weights.layouts import Bijection
from parity.weights.names import Span

# Every dtype that an array may have on its way, by name.
DTYPES: dict[str, np.dtype] = {
    **{name: np.dtype(name) for name in ("float64", "float32", "float16", "complex64", "complex128", "bool")},
    **{f"{sign}int{width}": np.dtype(f"{sign}int{width}") for sign in ("", "u") for width in (8, 16, 32, 64)},
    **{
        name: np.dtype(getattr(ml_dtypes, name))
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    },
}


# What a sentence calls the module whose path is empty.
ROOT = "the model"


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
    """Where a leaf lies in an array of which it is only a part.

    Attributes:
        whole: dotted path of the array.
        identity: of the array.
        shape: of the array, as `before` lays it out.
        spans: the places that the leaf takes, for each axis.
        before: how the array is laid out before it is cut; None takes it as it is.
    """

    whole: str
    identity: Hashable
    shape: tuple[int, ...]
    spans: tuple[Span, ...]
    before: Bijection | None = None

    @property
    def index(self) -> tuple[int | slice, ...]:
        """What takes the leaf out of the array."""
        return tuple(span.index for span in self.spans)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The leaf's shape."""
        return tuple(len(span.places) for span in self.spans if not span.single)

    def of(self, array: np.ndarray) -> np.ndarray:
        """This part of the whole array, as a view where nothing comes before."""
        return (self.before.apply(array) if self.before else array)[self.index]


class Claim(NamedTuple):
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
        mark: the slice by which a rename takes it, as that writes it: `[:, 0:8]`. It stands behind every name of the leaf.
        claims: layers further up whose row names the array.
        from_file: whether it is read from a file.
        also: further paths under which torch may know the layer, such as `layers.0` for Linen's `layers_0`.
        by_name: whether only the layer's name tells `kinds`.
        merged: paths of the arrays that it is computed from, if the model has no such array itself.
        loose: whether it may stay without counterpart, because it may be a constant that the model computed.
        new: whether it lies in a file that is still to be made, so that nothing stands in its place.
        digest: of the whole array, where that is all that is known of its values.
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
    mark: str = ""
    claims: tuple[Claim, ...] = ()
    from_file: bool = False
    also: tuple[str, ...] = ()
    by_name: bool = False
    merged: tuple[str, ...] = ()
    loose: bool = False
    new: bool = False
    digest: str = ""

    @property
    def array_path(self) -> str:
        """Dotted path of the model's array: the leaf's own, unless the leaf is only a part of it."""
        return self.part.whole if self.part else self.path

    def of(self, array: np.ndarray) -> np.ndarray:
        """What belongs to this leaf in an array of the shape of the model's."""
        return self.part.of(array) if self.part else array

    @property
    def bare_path(self) -> str:
        """The path without the slice behind it."""
        return self.path.removesuffix(self.mark)

    def cut(self, names: tuple[str, ...]) -> tuple["Leaf", ...]:
        """The leaf in as many equal blocks of rows as there are names: `weight[q]`, `weight[k]`, `weight[v]`."""
        rows = self.shape[0] // len(names)
        behind = tuple(Span(range(size)) for size in self.shape[1:])
        blocks = [(Span(range(number * rows, (number + 1) * rows)), *behind) for number in range(len(names))]
        return tuple(
            replace(
                self.at(spans, f"[{name}]"),
                name=f"{self.name}[{name}]",
                claims=tuple(claim._replace(name=f"{claim.name}[{name}]") for claim in self.claims),
                mark="",
            )
            for name, spans in zip(names, blocks, strict=True)
        )

    def at(self, spans: tuple[Span, ...], mark: str, before: Bijection | None = None) -> "Leaf":
        """A part of the leaf, with what stands behind its name; `before` lays the whole out first."""
        shape = before.shape(self.shape) if before else self.shape
        part = Part(self.path, self.identity, shape, spans, before)
        return replace(
            self,
            path=f"{self.path}{mark}",
            shape=part.own_shape,
            identity=(self.identity, before, spans),
            read=lambda: part.of(self.read()),
            share=lambda axes: part.of(self.read()).transpose(axes),
            part=part,
            mark=mark,
        )


@dataclass(frozen=True)
class Layer:
    """One layer of a model, for its settings.

    Attributes:
        path: dotted path in torch's words.
        kinds: public names of its classes along the MRO.
        settings: its attributes.
        own_path: dotted path in the framework's own words.
        also: as of a leaf.
        by_name: as of a leaf; then it has no settings.
        named: the names of its settings, those of layers inside left out.
        identity: equal for two layers exactly if they are one module under two paths; None where no module is.
    """

    path: str
    kinds: tuple[str, ...]
    settings: Callable[[str], Any] = field(compare=False, repr=False)
    own_path: str = ""
    also: tuple[str, ...] = ()
    by_name: bool = False
    named: Callable[[], list[str]] = field(default=list, compare=False, repr=False)
    identity: Hashable = field(default=None, compare=False, repr=False)


def gathered(arrays: Iterable[tuple[Leaf, np.ndarray]]) -> dict[str, Any]:
    """Arrays of leaves by the path of the model's array; parts are put together, each as it comes.

    Raises:
        ValueError: a part is missing.
    """
    whole: dict[str, Any] = {}
    parts: dict[str, Part] = {}
    filled: dict[str, int] = {}
    for leaf, array in arrays:
        part = leaf.part
        if part is None:
            whole[leaf.path] = array
            continue
        if part.whole not in parts:
            parts[part.whole], whole[part.whole] = part, np.empty(part.shape, array.dtype)
        whole[part.whole][part.index] = array
        filled[part.whole] = filled.get(part.whole, 0) + array.size
    for path, part in parts.items():
        if filled[path] < whole[path].size:
            raise ValueError(f"{path} has {whole[path].size} values, and its parts {filled[path]}")
        whole[path] = part.before.inverse().apply(whole[path]) if part.before else whole[path]
    return whole


def digest(array: np.ndarray) -> str:
    """What two arrays share exactly if they have the same shape, dtype and bits, for all that anyone can tell."""
    told = hashlib.blake2b(f"{array.dtype} {array.shape} ".encode(), digest_size=16)
    told.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return told.hexdigest()
