"""A pair that differs when it is run alone, and what its torch module would compute if something were otherwise."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from parity.evidence.calls import Operation
from parity.evidence.hypotheses.weight import Arrays, Weight
from parity.evidence.isolation import Isolator
from parity.evidence.judging import bound, in_parts, over, torch_again
from parity.evidence.numerics import SEMANTICS_FACTOR, UNIT, comparable, finite_scale, largest_gap, same_specials
from parity.evidence.trees import flatten
from parity.evidence.trial import Place, Trial, by_argument, is_array, like
from parity.weights.leaf import Layer, Leaf

# A difference that falls below so many times what rounding explains counts as gone: torch's module under
# a hypothesis may compute in another order than Flax's.
GONE = 10.0
# Nothing is called explained unless the difference falls by as much: a better fit is no cause.
FALL = 1e-4

# How many operations of a kind are tried one by one; beyond that only all of them together.
ALONE = 8

Values = Mapping[Place, Any]
# An edit of one operation: its number, the edit's name, its settings.
Edits = Mapping[int, tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Variant:
    """What torch's module would compute if something were otherwise.

    Attributes:
        what: what Flax's module then does, in one sentence.
        change: what to write in the Flax code instead.
        values: computes it, by place; a place that is left out says nothing.
        unit: what may be left of the difference, in units of the largest value; 0 lets rounding alone be left.
        name: of the cause, if it is another than the hypothesis's.
        whole: whether it is a cause only if it explains every place of which it says something.
    """

    what: str
    change: str
    values: Callable[[], Values] = field(compare=False, repr=False)
    unit: float = 0.0
    name: str = ""
    whole: bool = False


class Suspect:
    """A call of a pair that differs although both were given the same.

    Args:
        isolator: that ran it.
        trial: the call.
        differing: the places that differ, in words; None takes those at which rounding does not explain the difference.
    """

    def __init__(self, isolator: Isolator, trial: Trial, differing: Sequence[str] | None = None):
        self.isolator, self.trial, self.subject = isolator, trial, isolator.subject
        self.torch_layer: Layer = isolator.torch_layers[trial.torch.path]
        self.flax_layer: Layer = isolator.flax_layers[trial.partner.path]
        # Weights that are known to be Flax's own, and edits taken for granted: hypotheses are tried on top of them.
        self.baseline: Mapping[str, np.ndarray] = {}
        self.base: Edits = {}
        # Differing places that no cause found so far explains, in words.
        self.open: Sequence[str] = ()
        self.before = {place: self.ratio(place, trial.expected.get(place)) for place in {**trial.expected, **trial.actual}}
        self.differing = [
            place for place, ratio in self.before.items() if (ratio > 1 if differing is None else str(place) in differing)
        ]

    # --- what is known of it ------------------------------------------------------------------

    @property
    def path(self) -> str:
        return self.trial.torch.path

    @property
    def kind(self) -> str:
        """The public name of torch's class."""
        return self.torch_layer.kinds[0]

    def is_a(self, *names: str) -> bool:
        """Whether torch's module is one of these classes of torch.nn, or derived from one."""
        return any(kind == f"torch.nn.{name}" for kind in self.torch_layer.kinds for name in names)

    @cached_property
    def operations(self) -> list[Operation]:
        """What torch's module does itself; nothing if it cannot be run again."""
        one = self.trial.torch
        try:
            with self.subject.torch.pinned():
                return self.subject.torch.operations(
                    self.subject.torch_model, one.path, one.args, one.kwargs, self.trial.replies, dtype=self.isolator.dtype
                )
        except Exception:
            return []

    def named(self, *names: str) -> list[Operation]:
        """The operations of these names, in place or not."""
        return [op for op in self.operations if op.name.rstrip("_").lstrip("_") in names or op.name in names]

    @cached_property
    def weights(self) -> list[Weight]:
        """The arrays of torch's module that no answering module below holds, each with Flax's in torch's layout."""
        answering = tuple(f"{name}." for name in self.trial.replies)
        every = self.isolator.weights
        return [w for path, w in every.items() if under(path, self.path) and not path.startswith(answering or "\0")]

    @cached_property
    def arrays(self) -> Arrays:
        """The same, beside those of the whole model."""
        return Arrays(self.torch_layer.kinds, self.weights, self.isolator.weights)

    @cached_property
    def unpaired_weights(self) -> list[Leaf]:
        """Floating point arrays of torch's module for which Flax has none."""
        known = {p.source.array_path for p in self.subject.pairing.pairs}
        answering = tuple(f"{name}." for name in self.trial.replies)
        return [
            leaf
            for leaf in self.subject.torch.leaves(self.subject.torch_model)
            if under(leaf.path, self.path) and leaf.path not in known and "float" in leaf.dtype
            if not leaf.path.startswith(answering or "\0")
        ]

    def known(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every value that torch's module has at hand: what it is given, what others give it, what it gives them."""
        for path, array in by_argument(self.trial.torch).items():
            yield f"its own {path}", array
        for key in self.isolator.children.get(self.trial.torch.key, ()):
            one = self.isolator.calls[key]
            call = f", call {one.call + 1}" if one.call else ""
            for path, array in by_argument(one).items():
                yield f"what {one.path}{call} is given ({path})", array
            for path, array in flatten(one.output, is_array):
                if is_array(array):
                    yield f"what {one.path}{call} returns{' at ' + path if path else ''}", array

    # --- what it would compute ----------------------------------------------------------------

    def again(self, edits: Edits | None = None, **changes: Any) -> Values:
        """Torch's module once more, with operations edited, other arguments, other weights or in train mode."""
        edits = {**self.base, **(edits or {})}
        if edits:
            changes["watch"] = self.subject.torch.Edited(edits)
        weights = changes.pop("weights", None)
        if weights is not None or self.baseline:
            changes["weights"] = {**self.baseline, **(weights or {})}
        return torch_again(self.trial, self.subject, **changes)

    def answer_of(self, child: str, value: np.ndarray) -> tuple[np.ndarray, float] | None:
        """What torch's module below returns for one array, and how much of it rounding explains, in units of its scale.

        None if it does not take the array, or returns a tree.
        """
        runs = []
        for watch in (None, self.subject.torch.Shaken(UNIT, self.subject.seed)):
            try:
                with self.subject.torch.pinned():
                    run = self.subject.torch.alone(
                        self.subject.torch_model, child, (value,), {}, dtype=self.isolator.dtype, watch=watch
                    )
            except Exception:
                return None
            runs.append(run.outputs.get(""))
        first, other = runs
        if not is_array(first) or first.dtype.kind != "f":
            return None
        return first, SEMANTICS_FACTOR * largest_gap(other, first) / (finite_scale(first) or 1.0)

    def edited(self, chosen: Iterable[Operation], edit: str, **settings: Any) -> "Edited":
        """The module with one edit at each of the chosen operations."""
        return Edited(self, {op.number: (edit, settings) for op in chosen})

    def edited_each(self, edits: Iterable[tuple[Operation, str, Mapping[str, Any]]]) -> "Edited":
        """The module with an edit of its own at each of some operations."""
        return Edited(self, {op.number: (edit, settings) for op, edit, settings in edits})

    def flax_again(self, **changes: Any) -> Values:
        """Flax's module once more on the same arguments, at the places that are its own outputs."""
        trial = self.trial
        run = self.isolator.run_flax(trial, self.flax_replies(), **changes)
        other = replace(trial, expected={}, noise={}, actual={})
        told = {n: c for n, c in self.isolator.told(trial.torch).items() if n in trial.replies}
        self.isolator.collect(other, run, told)
        return other.actual

    def flax_replies(self) -> dict[str, list[Any]]:
        told = self.isolator.told(self.trial.torch)
        return {self.isolator.partners[n].path: [r for _, r in calls] for n, calls in told.items() if n in self.trial.replies}

    # --- how well it fits ---------------------------------------------------------------------

    def ratio(self, place: Place, value: Any, unit: float = 0.0) -> float:
        """How far Flax's value is from another one, in units of what rounding explains."""
        return self.distance(place, value, self.trial.actual.get(place), unit)

    def distance(self, place: Place, value: Any, actual: Any, unit: float = 0.0) -> float:
        """How far a value is from one of torch's, in units of what rounding explains."""
        if not is_array(actual) or not is_array(value):
            return 0.0 if type(actual) is type(value) and bool(actual == value) else float("inf")
        if actual.dtype == value.dtype == bool:
            # A mask hides the same, however much of it is spelled out.
            actual, value = like(actual, value), like(value, actual)
        if not comparable(actual, value):
            return float("inf")
        a, b = in_parts(actual), in_parts(value)
        if not same_specials(a, b).all():
            return float("inf")
        with np.errstate(invalid="ignore"):
            gap = np.nan_to_num(np.abs(a - b), nan=0.0)
        known = self.trial.bounds.get(place, np.zeros(b.shape))
        # A value of another shape than torch's is allowed what the largest of torch's is.
        known = known if known.shape == b.shape else np.full(b.shape, known.max(initial=0.0))
        limit = np.maximum(known, bound(None, value)) + unit * finite_scale(b)
        return float(over(gap, limit).max(initial=0.0))

    def explained(self, values: Values, unit: float = 0.0) -> tuple[dict[Place, float], bool]:
        """The differing places whose difference is gone, each with what is left, and whether none that agreed is broken."""
        after = {place: self.ratio(place, value, unit) for place, value in values.items()}
        gone = {p: after[p] for p in self.differing if p in after and after[p] <= min(GONE, self.before[p] * FALL)}
        broken = any(ratio > GONE for place, ratio in after.items() if place not in self.differing)
        return gone, not broken

    def residual(self, values: Values) -> np.ndarray:
        """What is left of the difference at the differing places, in one row; empty if shapes do not fit."""
        rows = []
        for place in self.differing:
            actual, value = self.trial.actual.get(place), values.get(place)
            if not is_array(value) or not comparable(actual, value):
                return np.zeros(0)
            # Of infinities on both sides nothing is left.
            with np.errstate(invalid="ignore"):
                rows.append((in_parts(value) - in_parts(actual)).ravel())
        row = np.concatenate(rows) if rows else np.zeros(0)
        return row if np.isfinite(row).all() else np.zeros(0)

    def left_of(self, values: Values) -> float:
        """The share of the difference that is left, in the mean square; infinite if shapes or NaN do not fit."""
        before, after = self.residual(self.trial.expected), self.residual(values)
        if not after.size or after.shape != before.shape:
            return float("inf")
        return float(np.linalg.norm(after) / (np.linalg.norm(before) or 1.0))

    def solved(self, values: Callable[[float], Values], start: Sequence[float]) -> float | None:
        """The number for which the difference is gone, found from the best of some; None if there is none.

        Gauss and Newton's steps on the logarithm, so that an epsilon is found as well as a factor.
        """
        tried = [(norm(self.residual(values(number))), number) for number in start]
        size, first = min(tried, key=lambda t: t[0])
        best = first
        if not np.isfinite(size):
            return None
        for _ in range(STEPS):
            here, step = self.residual(values(best)), 1e-6
            there = self.residual(values(best * (1 + step)))
            if not here.size or here.shape != there.shape:
                return None
            slope = (there - here) / step
            if not slope.any():
                return None
            move = float(np.clip(-(slope @ here) / (slope @ slope), -2, 2))
            best *= float(np.exp(move))
            if abs(move) < 1e-13:
                break
        # Where a start is the number itself, the steps move it by rounding alone.
        return best if norm(self.residual(values(best))) < size else first

    def solved_near(self, values: Callable[[float], Values], start: Sequence[float]) -> float | None:
        """The same, only where one of the first numbers takes away a part of the difference: each step costs two runs."""
        near = any(self.left_of(values(number)) < NEARER for number in start)
        return self.solved(values, start) if near else None


@dataclass(frozen=True)
class Edited:
    """What torch's module computes with some operations edited.

    Attributes:
        suspect: the pair.
        edits: by number of the operation.
    """

    suspect: Suspect
    edits: Edits

    def __call__(self) -> Values:
        return self.suspect.again(self.edits)


def groups(chosen: Iterable[Operation]) -> Iterator[tuple[str, list[Operation]]]:
    """All operations of a kind together, those of one shape together, every second or third, and each alone; with words."""
    all_ = list(chosen)
    yield "", all_
    if len(all_) < 2:
        return
    shapes: dict[Any, list[Operation]] = {}
    for op in all_:
        shapes.setdefault((op.shapes, op.shape), []).append(op)
    for shape, those in shapes.items():
        if 1 < len(those) < len(all_):
            yield f" where it takes {shape[0][0]}", those
    # In a loop over a sequence the same operation stands once or several times in each step.
    for period in (2, 3, 4) if len(all_) >= 4 else ():
        for first in range(period) if len(all_) % period == 0 and len(all_) > period else ():
            yield f" (the {ORDINALS[first]} of every {period})", all_[first::period]
    for number, op in enumerate(all_ if len(all_) <= ALONE else []):
        yield f" (number {number + 1} of {len(all_)})", [op]


# What a number that is not yet the right one must leave of the difference at most for the right one to be looked for.
NEARER = 0.95
ORDINALS = ("first", "second", "third", "fourth")
STEPS = 25


def norm(row: np.ndarray) -> float:
    return float(np.abs(row).max()) if row.size else float("inf")


def under(path: str, owner: str) -> bool:
    return not owner or path.startswith(f"{owner}.")
