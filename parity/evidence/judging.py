"""What differs in a call that was run alone, beyond what rounding explains."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from parity.evidence.calls import Alone
from parity.evidence.conventions import MASK
from parity.evidence.faults import Difference
from parity.evidence.numerics import (
    SEMANTICS_FACTOR,
    UNIT,
    alike,
    finite_scale,
    same_specials,
    semantics_bounds,
    wide,
)
from parity.evidence.subject import Subject
from parity.evidence.trees import in_words
from parity.evidence.trial import Place, Trial, broadcasts_alike, is_array, like, regrouped

# A difference that large is no question of rounding, not even of a module that computes in float32 all through a
# float64 run, as a rotary embedding does with its angles: 2^29 times as coarse, over the 64 that are allowed,
# and some hundreds for what that is multiplied by. Shaken roundings break ties (a query of which every score is
# -1e20), and must not swallow such a difference: they count only where they explain less than a thousandth of it.
GROSS, SWALLOWED = 1e10, 1e3

SHAKEN_RUNS = 3


def compared(trial: Trial, subject: Subject) -> tuple[tuple[Difference, ...], float]:
    """What differs between the two, place by place, and the largest difference over what rounding explains."""
    if trial.error:
        return (), float("inf")
    trial.bounds = bounds(trial)
    differences, worst = differing(trial, trial.actual)
    # Roundings inside a fused operation are looked at only where nothing but small rows differ.
    for mode in ("Shaken", "Elementary"):
        if not differences or (mode == "Elementary" and not in_rows_alone(trial, differences)):
            break
        trial.bounds = bounds(trial, rounded_otherwise(trial, subject, mode))
        differences, worst = differing(trial, trial.actual)
    return differences, worst


def bounds(trial: Trial, shaken: Sequence[Mapping[Place, Any]] = ()) -> dict[Place, np.ndarray]:
    """What rounding explains at each place, value by value."""
    found = {}
    for place, leaf in trial.expected.items():
        if is_array(leaf):
            found[place] = tight = bound(trial.noise.get(place), leaf)
            runs = [run[place] for run in shaken if fits(run.get(place), trial, place)]
            if runs:
                loose = bound(trial.noise.get(place), leaf, runs)
                found[place] = np.where(gross(trial, place, tight, loose), tight, loose)
    return found


def gross(trial: Trial, place: Place, tight: np.ndarray, loose: np.ndarray) -> np.ndarray:
    """Where a difference is no question of rounding, although shaken roundings would swallow it."""
    gap = gap_at(trial, place)
    # By the largest bound of values like it: a small row may be exact in torch, and its own bound nothing.
    least = largest_like_it(trial, place, tight)
    beyond, lost = (gap > GROSS * least) & (least > 0), swallowed(gap, least, loose)
    # Where some of it is plainly more than roundings do, these are what the rest is known to: float32 inside, say.
    return lost if (lost == beyond).all() else np.zeros(gap.shape, bool)


def swallowed(gap: Any, tight: Any, loose: Any) -> Any:
    """Where a difference is too gross against its tight bound for the loose one, of shaken roundings, to explain it."""
    return (gap > GROSS * tight) & (tight > 0) & (gap < SWALLOWED * loose)


def in_rows_alone(trial: Trial, differences: Sequence[Difference]) -> bool:
    """Whether all that differs is numbers that the noise of larger rows would explain."""
    told = {one.where for one in differences}
    if any(one.reason for one in differences):
        return False
    places = [(place, limit) for place, limit in trial.bounds.items() if str(place) in told]
    return all((gap_at(trial, place) <= largest_like_it(trial, place, limit)).all() for place, limit in places)


def gap_at(trial: Trial, place: Place) -> np.ndarray:
    """The differences at one place; none where the two have other shapes."""
    mine, theirs = trial.expected[place], trial.actual.get(place)
    if not is_array(theirs) or theirs.size != mine.size or (theirs.dtype.kind == "c") != (mine.dtype.kind == "c"):
        return np.zeros(in_parts(mine).shape)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.nan_to_num(np.abs(in_parts(theirs.reshape(mine.shape)) - in_parts(mine)), nan=0.0)


def largest_like_it(trial: Trial, place: Place, limit: np.ndarray) -> np.ndarray:
    """For each value the largest bound of those of its magnitude, whatever row they are in."""
    found = np.zeros(limit.shape)
    for part in alike(in_parts(trial.expected[place])):
        found[part] = limit[part].max(initial=0.0)
    return found


def fits(found: Any, trial: Trial, place: Place) -> bool:
    return is_array(found) and found.shape == trial.expected[place].shape


def rounded_otherwise(trial: Trial, subject: Subject, mode: str) -> list[dict[Place, Any]]:
    """Torch's module again, with every intermediate result moved by at most half an ulp; never if it was only recorded."""
    if "torch" in subject.recorded:
        return []
    watching = getattr(subject.torch, mode)
    settings = (UNIT, "float64") if mode == "Elementary" else (UNIT,)
    return [torch_again(trial, subject, watch=watching(*settings, subject.seed * 101 + run)) for run in range(SHAKEN_RUNS)]


def torch_again(trial: Trial, subject: Subject, **changes: Any) -> dict[Place, Any]:
    """Torch's module run alone under changes, its children answering as they did; its values by place."""
    one = replace(trial.torch, args=changes.pop("args", trial.torch.args), kwargs=changes.pop("kwargs", trial.torch.kwargs))
    replies = changes.pop("replies", trial.replies)
    with subject.torch.pinned():
        run = subject.torch.alone(subject.torch_model, one.path, one.args, one.kwargs, replies, **changes)
    return subject.padding.blank(at_places(trial, run))


def at_places(trial: Trial, run: Alone) -> dict[Place, Any]:
    """The values of a torch run at the places that are compared."""
    given: dict[tuple[str, int], dict[str, Any]] = {}
    for (child, call, path), value in run.given.items():
        given.setdefault((child, call), {})[path] = value
    for (child, call), arrays in given.items():
        rule = trial.child_rules.get(child)
        given[child, call] = rule.rewritten(arrays) if rule else arrays
    found = {}
    for place, mine in trial.expected.items():
        if place.child is None:
            found[place] = run.outputs.get(place.path)
            continue
        value = given.get((place.child, place.call), {}).get(place.path)
        found[place] = like(value, mine) if place.path == MASK and is_array(value) and is_array(mine) else value
    return found


def bound(noise: Any, expected: np.ndarray, shaken: Sequence[np.ndarray] = ()) -> np.ndarray:
    """What rounding explains between two float64 values of one place, for each of its numbers."""
    plain = noise if is_array(noise) and noise.shape == expected.shape else expected
    return semantics_bounds(in_parts(plain), in_parts(expected), [in_parts(run) for run in shaken])


def in_parts(array: np.ndarray) -> np.ndarray:
    """The array in float64, complex numbers as real and imaginary part on a last axis; only to be read."""
    return np.stack([wide(array.real), wide(array.imag)], axis=-1) if array.dtype.kind == "c" else wide(array)


def differing(trial: Trial, actual: Mapping[Place, Any]) -> tuple[tuple[Difference, ...], float]:
    """What differs between torch's values and others at the same places, worst first."""
    found, worst = [], 0.0
    for place in [*trial.expected, *(p for p in actual if p not in trial.expected)]:
        difference, ratio = difference_at(place, trial, actual)
        worst = max(worst, ratio)
        found += [difference] if difference else []
    return tuple(sorted(found, key=lambda d: -d.ratio)), worst


def difference_at(place: Place, trial: Trial, actual: Mapping[Place, Any]) -> tuple[Difference | None, float]:
    def reason(text: str) -> tuple[Difference, float]:
        return Difference(str(place), float("inf"), reason=text), float("inf")

    if place not in actual or place not in trial.expected:
        side, other = ("torch", "flax") if place in trial.expected else ("flax", "torch")
        return reason(f"{side} has it, {other} has not")
    mine, theirs = trial.expected[place], actual[place]
    if not is_array(mine) or not is_array(theirs):
        same = is_array(mine) == is_array(theirs) and bool(mine == theirs)
        return (None, 0.0) if same else reason(f"expected (torch) {told(mine)}, actual (flax) {told(theirs)}")
    # Inside a model whoever takes it knows its form.
    if (trial.torch.path or place.child is not None) and (broadcasts_alike(mine, theirs) or regrouped(mine, theirs)):
        theirs = theirs.reshape(mine.shape)
    if mine.shape != theirs.shape:
        return reason(f"expected (torch) shape {mine.shape}, actual (flax) {theirs.shape}")
    if mine.dtype.kind in "biu" or theirs.dtype.kind in "biu":
        wrong = mine.astype(np.float64) != theirs.astype(np.float64)
        if not wrong.any():
            return None, 0.0
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        figures = (int(wrong.sum()), wrong.size, at, float(theirs[at]), float(mine[at]))
        return Difference(str(place), float("inf"), *figures), float("inf")
    a, b = in_parts(theirs), in_parts(mine)
    if a.shape != b.shape:
        return reason(f"expected (torch) {mine.dtype}, actual (flax) {theirs.dtype}")
    special = same_specials(a, b)
    if not special.all():
        at = tuple(int(i) for i in np.argwhere(~special)[0])
        count = f"NaN or infinity at {int((~special).sum())} places on one side only, first at {at}"
        return reason(f"{count}: expected (torch) {b[at]:.6g}, actual (flax) {a[at]:.6g}")
    limit = trial.bounds[place]
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.nan_to_num(np.abs(a - b), nan=0.0)
    # Zero in exact arithmetic on both sides: what each has is its rounding.
    if (np.maximum(np.abs(a), np.abs(b)) <= limit).all():
        return None, float(over(gap, limit).max(initial=0.0))
    ratio = float(over(gap, limit).max(initial=0.0))
    if ratio <= 1:
        return None, ratio
    beyond = np.where(gap > limit, gap, 0.0)
    at = tuple(int(i) for i in np.unravel_index(int(beyond.argmax()), gap.shape))
    unit = UNIT.get(str(theirs.dtype), 0.0)
    text = ""
    if unit > UNIT["float64"] and mine.dtype == np.float64 and gap.max() <= SEMANTICS_FACTOR * unit * finite_scale(b):
        text = f"Flax has {theirs.dtype} in a float64 run, torch float64: a cast or a dtype argument pins it"
    figures = (int((gap > limit).sum()), gap.size, at, float(a[at]), float(b[at]))
    return Difference(str(place), ratio, *figures, float(gap[at]), text), ratio


def over(gap: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Differences in units of what is allowed; none is 0 even where nothing is."""
    return np.divide(gap, limit, out=np.where(gap > 0, np.inf, 0.0), where=limit > 0)


def told(value: Any) -> str:
    return f"an array {value.shape}" if is_array(value) else in_words(value)
