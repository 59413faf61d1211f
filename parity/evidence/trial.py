"""One call of one pair, run alone: what each side was given and what came of it, laid side by side."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from parity.evidence.calls import ModuleCall
from parity.evidence.conventions import AS_IN_TORCH, MASK, Axes, Convention
from parity.evidence.numerics import finite_scale, largest_gap
from parity.evidence.partners import Partner
from parity.evidence.sampling import Sample
from parity.evidence.trees import flatten, mapped

# What can be given to a module beside arrays and be compared.
PLAIN = (bool, int, float, str)


class NotComparableError(Exception):
    """A pair cannot be run alone on the same numbers; the text says why."""


@dataclass(frozen=True)
class Place:
    """Where a value leaves a module's own code: an output, or an argument of a module below.

    Attributes:
        child: torch path of the module below; None for the module's own output.
        call: which call of it within this one, from 0.
        path: of the leaf, in torch's words.
    """

    child: str | None
    call: int
    path: str

    def __str__(self) -> str:
        if self.child is None:
            return f"output {self.path}".rstrip()
        return f"what it gives {self.child}" + (f", call {self.call + 1}" if self.call else "") + f": {self.path}"


@dataclass
class Trial:
    """One call of one pair, run alone.

    Attributes:
        torch: the record of torch's float64 run.
        plain: of its run in the dtype of the model.
        partner: the Flax module.
        axes: the order of axes in which Flax was run.
        rule: the convention of the pair, None if the ledger knows none.
        args: what Flax was given, and `kwargs`.
        replies: of the modules below, in Flax's layout, by torch path.
        expected: torch's values by place, in torch's layout.
        noise: those of torch's run in the dtype of the model.
        actual: Flax's values by place, in torch's layout; what has none, Flax did not produce.
        free: children that ran for themselves, with the reason.
        note: what a reader must know.
        error: what Flax raised.
        bounds: what rounding explains at each place, value by value.
        child_rules: how the modules below are called, by torch path.
    """

    torch: ModuleCall
    plain: ModuleCall
    partner: Partner
    axes: Axes = AS_IN_TORCH
    rule: Convention | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    replies: dict[str, list[Any]] = field(default_factory=dict)
    expected: dict[Place, Any] = field(default_factory=dict)
    noise: dict[Place, Any] = field(default_factory=dict)
    actual: dict[Place, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ()
    note: str = ""
    error: str = ""
    bounds: dict[Place, np.ndarray] = field(default_factory=dict)
    child_rules: dict[str, Convention | None] = field(default_factory=dict)


def broadcasts_alike(mine: Any, theirs: Any) -> bool:
    """Whether two arrays differ in leading axes of length one alone, which every sum and product broadcasts away."""
    if not is_array(mine) or not is_array(theirs) or mine.shape == theirs.shape:
        return False
    if isinstance(mine, Sample) or isinstance(theirs, Sample):
        return False
    short, long = sorted((mine.shape, theirs.shape), key=len)
    return (1,) * (len(long) - len(short)) + short == long


def regrouped(mine: Any, theirs: Any) -> bool:
    """Whether two arrays have the same axes in one order, some of them joined on one side, as heads are."""
    if not is_array(mine) or not is_array(theirs) or mine.ndim == theirs.ndim or mine.size != theirs.size:
        return False
    short, long = sorted((mine.shape, theirs.shape), key=len)
    # An axis of length one is kept or dropped for a reason: sums and products after it tell the two apart.
    if short.count(1) != long.count(1):
        return False
    left = list(long)
    for size in short:
        held = 1
        while left and held < size:
            held *= left.pop(0)
        if held != size:
            return False
    return not left


def is_array(value: Any) -> TypeGuard[np.ndarray]:
    return isinstance(value, np.ndarray)


@dataclass(frozen=True)
class Arguments:
    """What a Flax module is given, with torch's values in it.

    Attributes:
        args: positional arguments, and `kwargs`.
        sources: torch's path of each array, by Flax's.
        kept: arrays for which torch has none: they are Flax's own.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sources: dict[str, str]
    kept: tuple[str, ...] = ()


def by_argument(one: ModuleCall, rule: Convention | None = None) -> dict[str, np.ndarray]:
    """The arrays that a module is given, by their path in the call, as its rule lays them out."""
    found = {spoken(path): leaf for path, leaf in flatten((one.args, dict(one.kwargs)), is_array) if is_array(leaf)}
    return rule.rewritten(found) if rule else found


def refilled(one: ModuleCall, own: ModuleCall, axes: Axes, rule: Convention | None) -> Arguments:
    """Flax's own arguments with torch's values in the places where they belong."""
    mine = by_argument(one, rule)
    where = {flax: torch for torch, flax in (rule.arguments or {}).items()} if rule else {}
    sources, kept = dict[str, str](), list[str]()

    def fill(path: str, leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        name = spoken(path)
        if name == MASK and MASK in mine:
            sources[MASK] = MASK
            return like(mine[MASK], leaf).astype(leaf.dtype)
        for source in [where[name]] if name in where else [name, *mine]:
            array = mine.get(source)
            if array is None or source in sources.values() or array.dtype.kind != leaf.dtype.kind:
                continue
            if axes.to_flax(array).shape == leaf.shape:
                sources[name] = source
                return axes.to_flax(array)
        kept.append(name)
        return leaf

    args, kwargs = mapped(fill, (own.args, dict(own.kwargs)))
    if MASK in mine and MASK not in sources and not mine[MASK].all():
        # Torch's module hides something where Flax's is told of nothing.
        kwargs, sources[MASK] = {**kwargs, "mask": mine[MASK]}, MASK
    return Arguments(args, kwargs, sources, tuple(kept))


def like(mask: np.ndarray, other: np.ndarray) -> np.ndarray:
    """A mask in the shape of another, where it can be broadcast to it."""
    try:
        return np.broadcast_to(mask, np.broadcast_shapes(mask.shape, other.shape))
    except ValueError:
        return mask


def skeleton(one: ModuleCall, rule: Convention) -> ModuleCall:
    """A call of a Flax layer as its rule lays it out, for a layer that is never seen called."""
    mine = by_argument(one)
    places: dict[str, Any] = {
        flax: rule.axes.to_flax(mine[torch]) for torch, flax in (rule.arguments or {}).items() if torch in mine
    }

    def built(prefix: str) -> Any:
        if prefix in places:
            return places[prefix]
        parts: list[Any] = []
        while any(name.startswith(f"{prefix}[{len(parts)}]") for name in places):
            parts.append(built(f"{prefix}[{len(parts)}]"))
        return tuple(parts)

    if rule.arguments is None:
        return ModuleCall(one.path, one.call, tuple(turned(rule.axes, leaf) for leaf in one.args), {}, None, None)
    return ModuleCall(one.path, one.call, built("args"), {}, None, None)


def spoken(path: str) -> str:
    """The path of a leaf of (args, kwargs) in the words of a call: `args[0]`, `kwargs['mask']`."""
    return f"args{path[3:]}" if path.startswith("[0]") else f"kwargs{path[3:]}"


def turned(axes: Axes, leaf: Any) -> Any:
    return axes.to_flax(leaf) if is_array(leaf) else leaf


def turned_back(axes: Axes, leaf: Any, expected: Any) -> Any:
    """A Flax leaf in torch's order of axes, if that is what makes it fit."""
    if not is_array(leaf) or not is_array(expected):
        return leaf
    back = axes.to_torch(leaf)
    return back if back.shape == expected.shape or leaf.shape != expected.shape else leaf


def values(tree: Any) -> Iterator[np.ndarray]:
    """The floating point arrays of a tree."""
    return (leaf for _, leaf in flatten(tree, is_array) if is_array(leaf) and leaf.dtype.kind == "f")


def distance(a: np.ndarray, b: np.ndarray) -> float:
    scale = finite_scale(b)
    return largest_gap(a, b) / scale if scale else 0.0
