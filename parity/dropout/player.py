"""Recorded masks handed out to a run of the other framework, and what of the two does not fit."""

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.dropout.masks import DropoutMasks, Place
from parity.errors import DivergenceError, InputError, listed

# A rate that went through float32 is still that rate.
SAME_RATE = 1e-6

# Kinds that may have a mask for every element of a feature map.
WHOLE = ("element", "alpha", "function")
# What makes a drop be missing.
MISSING = {
    "torch": "drop there too, in train mode",
    "flax": "drop there too, in train mode and by jax.random.bernoulli, in a scan by a new key in every step",
}


@dataclass
class Waiting:
    """A recorded drop that a run has not asked for yet."""

    place: Place
    mask: Any


@dataclass(frozen=True)
class Asked:
    """A drop that a run makes and nobody recorded."""

    path: str
    shape: tuple[int, ...]
    rate: float | None


class Player:
    """Hands out masks in order, module by module. What does not fit is kept and told at the end, all at once.

    A drop belongs to the innermost module around it that both models have. Inside that one, masks are
    handed out in the order in which they were drawn.

    Args:
        masks: what was recorded.
        arrays: masks in place of the recorded ones, of the structure of `masks.arrays()`; traced ones too.
        modules: the path, in torch's words, of every module of the model that runs, by all paths that it has.
        target: whose model that is: `torch` or `flax`.
        rename: makes a path of the recorded model one of the model that runs.
        channels_last: torch paths, or patterns of them, of drops on feature maps whose channels Flax has last;
            None decides by the shapes.
        repeats: whether every call of the whole model begins with the first mask again.
        silent: recorded paths of modules that are to return what they are given.

    Raises:
        InputError: arrays are not of that structure.
    """

    def __init__(
        self,
        masks: DropoutMasks,
        arrays: Mapping[str, Sequence[Any]] | None,
        modules: Mapping[str, str],
        target: str,
        *,
        rename: Callable[[str], str] = str,
        channels_last: Iterable[str] | None = None,
        repeats: bool = False,
        silent: Iterable[str] = (),
    ):
        self.source, self.target, self.convolutional = masks.source, target, masks.convolutional
        self.channels_last = None if channels_last is None else tuple(channels_last)
        self.problems: list[str] = []
        self.renamed = rename
        self.modules = {**modules, "": ""}
        # One module of several paths may be several modules in the other model: their drops are in one order.
        self.shared = {"": ""}
        for way, first in masks.modules.items():
            self.shared.setdefault(self.partner(way), self.partner(first))
        self.repeats, self.all = repeats, [Waiting(*one) for one in in_order(masks, arrays)]
        self.silent = frozenset(map(self.partner, silent))
        self.rewind()

    def rewind(self) -> None:
        """Hand out the first masks next."""
        self.extra: list[Asked] = []
        self.queues: dict[str, list[Waiting]] = {}
        for one in self.all:
            self.queues.setdefault(self.home(self.partner(one.place.path)), []).append(one)

    def enter(self) -> None:
        """The whole model is called."""
        if self.repeats:
            self.rewind()

    def leave(self) -> None:
        """That call is over."""
        if self.repeats:
            self.tell_unmatched()

    def partner(self, path: str) -> str:
        """Of the modules around a recorded drop, the innermost that the running model has too: its path there."""
        while (name := self.renamed(path)) not in self.modules:
            path = path.rpartition(".")[0]
        return self.modules[name]

    def home(self, path: str) -> str:
        """Of the modules around a drop of the running model, the innermost that the recorded one has too."""
        while path not in self.shared:
            path = path.rpartition(".")[0]
        return self.shared[path]

    def take(self, path: str, shape: Sequence[int], rate: float | None) -> Waiting | None:
        """The mask of a drop, in the shape in which it is asked for.

        Args:
            path: of the innermost module that drops, in torch's words.
            shape: of the mask.
            rate: probability that an element is dropped; None where that is not known.

        Returns:
            The drop with its mask, None if there is none that fits; the run may go on with any other mask then.
        """
        shape = tuple(map(int, shape))
        queue = self.queues.get(self.home(path), [])
        fitting = ((at, fit) for at, one in enumerate(queue) if (fit := self.fit(one.place, shape)))
        at, fit = next(fitting, (0, None))
        if not queue:
            self.extra.append(Asked(path, shape, rate))
            return None
        found = queue.pop(at)
        if fit is None:
            self.tell(self.misfit(found.place, path, shape))
            return None
        if rate is not None and abs(rate - found.place.rate) > SAME_RATE:
            self.tell(
                f"{self.names(found.place, path)} drops at another rate: {self.both(f'{found.place.rate:g}', f'{rate:g}')}; "
                "set the same"
            )
        return Waiting(found.place, fit(found.mask))

    def fit(self, place: Place, shape: tuple[int, ...]) -> Callable[[Any], Any] | None:
        """What makes a mask of the asked shape of a recorded one, None if nothing does."""
        own = place.shape
        move = moved_channels(own, shape, to_flax=self.target == "flax") if self.source != self.target else None
        last = self.channels_last
        if last is not None and place.kind in (*WHOLE, "channels", "alpha channels"):
            chosen = any(fnmatch.fnmatchcase(place.path, pattern) for pattern in last)
            return move if chosen else (as_it_is if own == shape else None)
        if own == shape:
            if move is not None and self.convolutional and len(own) > 3 and place.kind in WHOLE:
                self.tell(
                    f"{place.path or 'the model'} drops in shape {own}, which fits with the channels first and last; say with "
                    f"channels_last=() that Flax has them first, or with channels_last=({place.path!r},) that they are last"
                )
            return as_it_is
        if move is not None and place.kind != "attention":
            return move
        # torch folds batch and heads into one axis where it returns the attention weights.
        folded = own[-2:] == shape[-2:] and math.prod(own) == math.prod(shape) and {len(own), len(shape)} <= {3, 4}
        return (lambda mask: mask.reshape(shape)) if place.kind == "attention" and folded else None

    def misfit(self, place: Place, path: str, shape: tuple[int, ...]) -> str:
        """Why a mask cannot be used, in one sentence."""
        names, both = self.names(place, path), self.both(place.shape, shape)
        shared = shared_axes(place.shape, shape)
        if shared is not None:
            axes = ", ".join(map(str, shared))
            side = self.target if shape != place.shape and all(shape[axis] == 1 for axis in shared) else self.source
            advice = (
                "set broadcast_dropout=False or broadcast_dims=()" if side == "flax" else "use an elementwise dropout in torch"
            )
            return f"{names}: {side} broadcasts one mask over axis {axes}: {both}; {advice}"
        inside = shape == place.shape[1:] and self.target == "flax"
        advice = (
            "if that is inside jax.vmap, give the model the whole batch meanwhile"
            if inside
            else "drop the same tensor on both sides"
        )
        return f"{names}: the masks have other shapes: {both}; {advice}"

    def names(self, place: Place, path: str) -> str:
        mine = place.path or "the model"
        return mine if place.path == path else f"{mine} ({self.source}), {path or 'the model'} ({self.target})"

    def both(self, recorded: Any, asked: Any) -> str:
        torch, flax = (recorded, asked) if self.source == "torch" else (asked, recorded)
        if self.source == self.target:
            return f"expected (recorded) {recorded}, actual {asked}"
        return f"expected (torch) {torch}, actual (flax) {flax}"

    def tell(self, problem: str) -> None:
        """Keep what was found otherwise."""
        if problem not in self.problems:
            self.problems.append(problem)

    def finish(self) -> None:
        """Tell everything that did not fit.

        Raises:
            DivergenceError: something did not.
        """
        if not self.repeats:
            self.tell_unmatched()
        if self.problems:
            raise DivergenceError(listed("the two models do not drop alike", self.problems))

    def tell_unmatched(self) -> None:
        """Keep what was recorded or drawn by one side only."""
        left = [one.place for queue in self.queues.values() for one in queue]
        for problem in unmatched(left, list(self.extra), self):
            self.tell(problem)


def as_it_is(mask: Any) -> Any:
    return mask


def in_order(masks: DropoutMasks, arrays: Mapping[str, Sequence[Any]] | None) -> list[tuple[Place, Any]]:
    """Every recorded place with its mask, or with that given in its place.

    Raises:
        InputError: what is given has another structure.
    """
    if arrays is None:
        return [(drop.place, drop.mask) for drop in masks.drops]
    numbers: dict[str, int] = {}
    expected: dict[str, list[tuple[int, ...]]] = {}
    for place in masks.plan:
        expected.setdefault(place.path, []).append(place.shape)
    problems = [
        f"{path or 'the model'} has masks of shapes {given}, expected {expected.get(path, [])}"
        for path in dict.fromkeys([*expected, *arrays])
        if (given := [tuple(map(int, np.shape(mask))) for mask in arrays.get(path, ())]) != expected.get(path, [])
    ]
    if problems:
        raise InputError(
            listed("arrays must be of the structure of masks.arrays(); give those of a run with an equal plan", problems)
        )
    found = []
    for place in masks.plan:
        number = numbers[place.path] = numbers.get(place.path, -1) + 1
        found.append((place, arrays[place.path][number]))
    return found


def moved_channels(own: tuple[int, ...], shape: tuple[int, ...], *, to_flax: bool) -> Callable[[Any], Any] | None:
    """What moves the channels of a mask behind its other axes, or back, if its shape is the asked one then."""
    if len(own) < 3 or len(own) != len(shape):
        return None
    order = (0, *range(2, len(own)), 1) if to_flax else (0, len(own) - 1, *range(1, len(own) - 1))
    return (lambda mask: mask.transpose(order)) if tuple(own[axis] for axis in order) == shape else None


def shared_axes(own: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes over which one of two shapes shares what the other has for each element; None if that is not all."""
    if len(own) != len(shape):
        return None
    differing = [axis for axis, (a, b) in enumerate(zip(own, shape, strict=True)) if a != b]
    ones = [tuple(one[axis] == 1 for axis in differing) for one in (own, shape)]
    return tuple(differing) if differing and any(all(one) for one in ones) else None


def unmatched(left: list[Place], extra: list[Asked], player: Player) -> list[str]:
    """Recorded drops that nobody asked for, and drops that nobody recorded; one sentence each."""
    found, here, there = [], player.target, player.source
    for place in list(left):
        other = next((one for one in extra if one.shape == place.shape), None)
        if other is not None and other.path != place.path:
            left.remove(place)
            extra.remove(other)
            found.append(
                f"dropout stands at another place: {there} drops at {place.path or 'the model'}, {here} at "
                f"{other.path or 'the model'}, both in shape {place.shape}; move it, or say with rename= that they are one"
            )
    for path, places in grouped(left, lambda place: place.path).items():
        shapes = ", ".join(map(str, dict.fromkeys(place.shape for place in places)))
        found.append(
            f"dropout is missing: {there} drops at {path or 'the model'} {many(places)} more often than {here} "
            f"(shape {shapes}); {MISSING[here]}"
        )
    for path, asked in grouped(extra, lambda one: one.path).items():
        shapes = ", ".join(map(str, dict.fromkeys(one.shape for one in asked)))
        found.append(
            f"dropout too often: {here} drops at {path or 'the model'} {many(asked)} more often than {there} "
            f"(shape {shapes}); drop as often on both sides"
        )
    return found


def many(items: Sequence[Any]) -> str:
    return "once" if len(items) == 1 else f"{len(items)} times"


def grouped(items: Iterable[Any], key: Callable[[Any], str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found
