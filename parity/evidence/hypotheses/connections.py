"""Modules that are connected otherwise: what one is given, or what is returned, is another sum of the values at hand."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from parity.evidence.hypotheses.suspect import Suspect, Variant
from parity.evidence.hypotheses.tensors import MANY, at_all, known_values
from parity.evidence.trial import Place, is_array

# Of more than so many values at hand the sum is not told: a residual stream through four sublayers has five.
TERMS = 4
# What may be left of a sum beside its size for it to be looked at; the places are then judged by rounding.
NEAR = 1e-6

Known = Sequence[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Sum:
    """A value as a sum of others: `names`, each times its factor."""

    names: tuple[str, ...]
    factors: tuple[float, ...]
    value: np.ndarray

    def __str__(self) -> str:
        return " + ".join(name if factor == 1 else f"{factor:.6g} times {name}" for name, factor in zip(self.names, self.factors))


def connections(suspect: Suspect) -> Iterator[Variant]:
    """Modules run in another order, or take another sum of what is at hand: everything that differs together."""
    known = [*known_values(suspect), *answers(suspect)][:MANY]
    found: dict[Place, np.ndarray] = {}
    sentences, changes = [], []
    for place in suspect.differing:
        mine, theirs = suspect.trial.expected.get(place), suspect.trial.actual.get(place)
        if not is_array(mine) or not is_array(theirs) or theirs.dtype.kind != "f" or mine.dtype.kind != "f":
            continue
        flax = sum_of(theirs, known)
        if flax is None:
            continue
        torch = sum_of(mine, known)
        found[place] = flax.value
        sentences.append(f"{place} is {flax}")
        changes.append(f"{place} must be {torch}" if torch else f"see what torch does for {place}")
    if found:
        yield Variant(f"modules are connected otherwise: {'; '.join(sentences)}", "; ".join(changes), at_all(found))


def answers(suspect: Suspect) -> Iterator[tuple[str, np.ndarray]]:
    """What torch's modules below return for what Flax gives them, where that has another shape than in torch.

    Such a module cannot answer as torch's did, and has run for itself.
    """
    for place in suspect.differing:
        mine, theirs = suspect.trial.expected.get(place), suspect.trial.actual.get(place)
        if place.child is None or place.path != "args[0]" or not is_array(mine) or not is_array(theirs):
            continue
        if mine.shape != theirs.shape:
            value = suspect.answer_of(place.child, theirs)
            if is_array(value):
                yield f"what {place.child} returns for what it is given in Flax", value


def sum_of(value: np.ndarray, known: Known) -> Sum | None:
    """The sum of the fewest values that is this one; None if there is none, or too few numbers to tell."""
    alike = [(name, array) for name, array in known if array.shape == value.shape and np.isfinite(array).all() and array.any()]
    if value.size < 4 * TERMS or not alike or not np.isfinite(value).all() or not value.any():
        return None
    rows = np.stack([array.ravel() / np.linalg.norm(array) for _, array in alike])
    target = value.ravel() / np.linalg.norm(value)
    gram, onto = rows @ rows.T, rows @ target
    for count in range(1, min(TERMS, len(alike)) + 1):
        fitting = [s for s in itertools.combinations(range(len(alike)), count) if left_by(gram, onto, s) < NEAR]
        sums = [fitted(value, [alike[i] for i in chosen]) for chosen in fitting]
        if sums:
            # Values at hand may be sums of each other: plain sums are likelier than those with factors.
            return min(sums, key=lambda s: sum(abs(factor - 1) for factor in s.factors))
    return None


def left_by(gram: np.ndarray, onto: np.ndarray, chosen: tuple[int, ...]) -> float:
    """What is left of a value of length 1 beside its best sum of the chosen ones; infinite if those depend on each other."""
    inner, right = gram[np.ix_(chosen, chosen)], onto[list(chosen)]
    if np.linalg.det(inner) < NEAR:
        return float("inf")
    return float(np.sqrt(max(1 - right @ np.linalg.solve(inner, right), 0.0)))


def fitted(value: np.ndarray, terms: Known) -> Sum:
    """The best sum of some values, with whole factors where they are as good as whole."""
    columns = np.stack([array.ravel() for _, array in terms], axis=1)
    solved = np.linalg.lstsq(columns, value.ravel(), rcond=None)[0]
    factors = tuple(float(round(f)) if abs(f - round(f)) < NEAR else float(f) for f in solved)
    total = sum((factor * array for factor, (_, array) in zip(factors, terms)), np.zeros(value.shape))
    return Sum(tuple(name for name, _ in terms), factors, total)
