"""Modules that are connected otherwise: run in another order, left out, their answers exchanged, their sums others."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parity.evidence.calls import ModuleCall
from parity.evidence.hypotheses.suspect import Suspect, Values, Variant
from parity.evidence.hypotheses.tensors import MANY, answering, array_equal, at, at_all, given, known_values, named_factor
from parity.evidence.trial import Place, is_array

# A sum of more values than that is not looked for: a residual stream through four sublayers has five.
TERMS = 4
# What may be left of a sum beside its size for it to be looked at; the places are then judged by rounding.
NEAR = 1e-6

Known = Sequence[tuple[str, np.ndarray]]


# ---------------------------------------------------------------- what modules below answer


def answers_exchanged(suspect: Suspect) -> Iterator[Variant]:
    """What two modules below return, taken for each other: gate and value, query and key."""
    calls = answering(suspect)
    for one, other in itertools.combinations(calls, 2) if len(calls) <= MANY else ():
        # Of two of which one gets what the other returns the one is left out: that is told by itself.
        follows = any(array_equal(given(b), a.output) for a, b in ((one, other), (other, one)))
        if one.output.shape == other.output.shape and not np.array_equal(one.output, other.output) and not follows:
            what = f"what {told(one)} returns and what {told(other)} returns are taken for each other"
            layers = suspect.isolator.torch_layers
            alike = layers[one.path].kinds == layers[other.path].kinds and len(one.args) == len(other.args) == 1
            back = "exchange them back" + (", or call the two in torch's order" if alike else "")
            yield Variant(what, back, replied(suspect, {one.key: other.output, other.key: one.output}))


def answers_moved(suspect: Suspect) -> Iterator[Variant]:
    """What a module below returns, taken from the end or moved by one, as a table of positions read backwards."""
    calls = answering(suspect)
    for one in calls if len(calls) <= MANY else ():
        # The last axis is the features'.
        for axis in range(one.output.ndim - 1):
            moves = (("from the end", np.flip(one.output, axis)), ("moved by 1", np.roll(one.output, 1, axis)))
            for said, array in (*moves, ("moved by -1", np.roll(one.output, -1, axis))):
                if not np.array_equal(array, one.output):
                    what = f"what {told(one)} returns is taken {said} along axis {axis}"
                    yield Variant(what, "take it as it is", replied(suspect, {one.key: array}))


def left_out(suspect: Suspect) -> Iterator[Variant]:
    """A module below that is not applied: what it is given stands for what it returns; one call, or every."""
    paths: dict[str, list[ModuleCall]] = {}
    through: dict[tuple[str, int], np.ndarray] = {}
    for one in answering(suspect):
        array = given(one)
        if array is not None and array.shape == one.output.shape:
            paths.setdefault(one.path, []).append(one)
            through[one.key] = array
    for path, those in paths.items():
        for chosen in [those, *([one] for one in those if len(those) > 1)]:
            which = f", call {chosen[0].call + 1}" if len(chosen) < len(those) else ""
            what = f"{path}{which} is left out: what it is given stands for what it returns"
            yield Variant(what, f"apply {path}", replied(suspect, {one.key: through[one.key] for one in chosen}))


def told(one: ModuleCall) -> str:
    return one.path + (f", call {one.call + 1}" if one.call else "")


def replied(suspect: Suspect, changed: Mapping[tuple[str, int], np.ndarray]) -> "Replied":
    """Torch's module, some calls below answering with other arrays."""
    return Replied(suspect, changed)


@dataclass(frozen=True)
class Replied:
    """What torch's module computes if some calls below answer otherwise."""

    suspect: Suspect
    changed: Mapping[tuple[str, int], np.ndarray]

    def __call__(self) -> Values:
        """The values by place."""
        one, calls = self.suspect.trial.torch, self.suspect.isolator.calls
        replies = {path: list(answers) for path, answers in self.suspect.trial.replies.items()}
        for (path, call), array in self.changed.items():
            # Calls are counted within the model, answers within this call of the module.
            mine = [key for key in self.suspect.isolator.children[one.key] if key[0] == path]
            # One that ran for itself, because Flax calls it more or less often, answers here too.
            replies.setdefault(path, [calls[key].output for key in mine])[mine.index((path, call))] = array
        return self.suspect.again(replies=replies)


# ---------------------------------------------------------------- sums of the values at hand


@dataclass(frozen=True)
class Sum:
    """A value as a sum of others: `names`, each times its factor."""

    names: tuple[str, ...]
    factors: tuple[float, ...]
    value: np.ndarray

    def __str__(self) -> str:
        terms = zip(self.names, self.factors, strict=True)
        return " + ".join(
            name if factor == 1 else f"{named_factor(factor, self.value.shape)} times {name}" for name, factor in terms
        )


def term_factors(suspect: Suspect) -> Iterator[Variant]:
    """A value is the sum that torch takes, but one of its terms is multiplied by a number, for all who take it."""
    at_hand = known_values(suspect)[:MANY]
    calls = {f"what {told(one)} returns": one for one in answering(suspect)}
    for place, mine, theirs in numbers(suspect):
        known = [(name, array) for name, array in at_hand if not array_equal(array, mine)]
        torch = sum_of(mine, known) if mine.shape == theirs.shape else None
        if torch is None or len(torch.names) < 2:
            continue
        flax = fitted(theirs, [(name, array) for name, array in known if name in torch.names])
        other = [(n, f / g) for n, f, g in zip(flax.names, flax.factors, torch.factors, strict=True) if f != g]
        if len(other) == 1 and other[0][1]:
            name, factor = other[0]
            said = f"{name} is multiplied by {named_factor(factor, mine.shape)}"
            if name in calls:
                changed = {calls[name].key: factor * calls[name].output}
                yield Variant(said, "take it as torch does", replied(suspect, changed))
            else:
                yield Variant(f"in {place} {said}", "add it as torch does", at(place, flax.value))


def connected(suspect: Suspect) -> Iterator[Variant]:
    """Modules run in another order, or take another sum of what is at hand: everything that differs together."""
    answered = list(answers(suspect))
    known = [*known_values(suspect)[:MANY], *((name, array) for name, array, _ in answered)]
    found: dict[Place, Sum] = {}
    sentences, changes, norms = [], [], False
    for place, mine, theirs in numbers(suspect):
        flax = sum_of(theirs, known)
        if flax is None:
            continue
        torch = sum_of(mine, [(name, array) for name, array in known if not name.startswith(f"what {place.child} is given")])
        found[place] = flax
        sentences.append(f"{place} is {flax}")
        changes.append(f"{place} must be {torch}" if torch else f"see what torch does for {place}")
        norms |= torch is not None and normed(suspect, flax) != normed(suspect, torch)
    # One value that is another is told by itself, unless nothing else tells it.
    if not found or (not suspect.open and len({place.child for place in found if place.child}) < 2):
        return
    single = len(found) == 1 and all(len(one.names) == 1 for one in found.values())
    name = "norm placement" if norms and len(found) > 1 else "another value" if single else ""
    used = {term for one in found.values() for term in one.names}
    unit = max((rounding for term, _, rounding in answered if term in used), default=0.0)
    values = at_all({place: one.value for place, one in found.items()})
    yield Variant(f"modules are connected otherwise: {'; '.join(sentences)}", "; ".join(changes), values, unit, name)


def normed(suspect: Suspect, one: Sum) -> set[str]:
    """The terms of a sum that come from a norm."""
    return {
        name
        for name in one.names
        if any(is_norm(suspect, c.path) and name == f"what {told(c)} returns" for c in answering(suspect))
    }


def is_norm(suspect: Suspect, path: str) -> bool:
    return "norm" in suspect.isolator.torch_layers[path].kinds[0].lower()


def numbers(suspect: Suspect) -> Iterator[tuple[Place, np.ndarray, np.ndarray]]:
    """The differing places that hold floating point arrays, of whatever shapes, with torch's and Flax's."""
    for place in suspect.differing:
        mine, theirs = suspect.trial.expected.get(place), suspect.trial.actual.get(place)
        if is_array(mine) and is_array(theirs) and mine.dtype.kind == theirs.dtype.kind == "f":
            yield place, mine, theirs


def answers(suspect: Suspect) -> Iterator[tuple[str, np.ndarray, float]]:
    """What torch's modules below would return for what Flax gives them, or for values at hand that they may be given.

    Those that are given another shape than in torch, or are called more or less often, cannot answer as
    torch's did, and have run for themselves.

    Yields:
        In words what it is, the array, and how much of it rounding explains, in units of its scale.
    """
    for place, mine, theirs in numbers(suspect):
        if place.child is not None and place.path == "args[0]" and mine.shape != theirs.shape:
            answer = suspect.answer_of(place.child, theirs)
            if answer:
                yield f"what {place.child} returns for what Flax gives it", *answer
    at_hand = known_values(suspect)
    for child in suspect.trial.free:
        for name, array in at_hand if len(at_hand) <= MANY else ():
            answer = suspect.answer_of(child, array)
            if answer:
                yield f"what {child} returns for {name}", *answer


def sum_of(value: np.ndarray, known: Known) -> Sum | None:
    """The sum of the fewest values that is this one; None if there is none, or too few numbers to tell."""
    alike = [(name, np.broadcast_to(array, value.shape)) for name, array in known if spreads(array, value.shape)]
    if value.size < 4 * TERMS or not alike or not np.isfinite(value).all() or not value.any():
        return None
    rows = np.stack([array.ravel() / np.linalg.norm(array) for _, array in alike])
    target = value.ravel() / np.linalg.norm(value)
    gram, onto = rows @ rows.T, rows @ target
    # Of n values there are about n^4 / 24 sums of four.
    for count in range(1, min(TERMS if len(alike) <= MANY else 2, len(alike)) + 1):
        chosen = [s for s in itertools.combinations(range(len(alike)), count) if left_by(gram, onto, s) < NEAR]
        sums = [fitted(value, [alike[i] for i in s]) for s in chosen]
        if sums:
            # Values at hand may be sums of each other: plain sums are likelier than those with factors.
            return min(sums, key=lambda s: sum(abs(factor - 1) for factor in s.factors))
    return None


def spreads(array: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Whether a value can be a term of a sum of that shape: one for every position, perhaps, the same in the whole batch."""
    fits = array.size > 1 and len(shape) >= array.ndim and all(a in (1, b) for a, b in zip(array.shape[::-1], shape[::-1]))
    return fits and bool(np.isfinite(array).all() and array.any())


def left_by(gram: np.ndarray, onto: np.ndarray, chosen: tuple[int, ...]) -> float:
    """What is left of a value of length 1 beside its best sum of the chosen ones; infinite if those depend on each other."""
    inner, right = gram[np.ix_(chosen, chosen)], onto[list(chosen)]
    if np.linalg.det(inner) < NEAR:
        return float("inf")
    return math.sqrt(max(float(1 - right @ np.linalg.solve(inner, right)), 0.0))


def fitted(value: np.ndarray, terms: Known) -> Sum:
    """The best sum of some values, with whole factors where they are as good as whole."""
    columns = np.stack([np.broadcast_to(array, value.shape).ravel() for _, array in terms], axis=1)
    solved: list[float] = np.linalg.lstsq(columns, value.ravel(), rcond=None)[0].tolist()
    factors = tuple(float(round(f)) if abs(f - round(f)) < NEAR else f for f in solved)
    total = np.zeros(value.shape)
    for factor, (_, array) in zip(factors, terms, strict=True):
        total = total + factor * array
    return Sum(tuple(name for name, _ in terms), factors, total)
