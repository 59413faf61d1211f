"""A term or a factor forgotten, or taken twice."""

import math
from collections.abc import Iterator

import numpy as np

from parity.evidence.hypotheses.suspect import Suspect, Variant
from parity.evidence.hypotheses.tensors import at, factor, floats, known_values, named_factor
from parity.evidence.numerics import comparable, same_specials
from parity.evidence.trial import Place, is_array


def summing(suspect: Suspect) -> Iterator[Variant]:
    """An operand of a sum left out, taken twice, or with the other sign."""
    for op in suspect.named("add", "sub"):
        if len(op.shapes) == 2 and op.shapes[0] == op.shapes[1]:
            for edit in ("left out", "other operand"):
                yield Variant("one term of a sum is not added", "add both", suspect.edited([op], edit))
            for operand in (0, 1):
                yield Variant("one term of a sum is added twice", "add it once", suspect.edited([op], "twice", operand=operand))
                what = f"one term has the other sign where torch computes {op.name.strip('_')}"
                yield Variant(what, "give it torch's sign", suspect.edited([op], "other sign", operand=operand))
    for place, delta in finite_differences(suspect):
        for name, array in addends(suspect, delta.shape):
            yield from in_part(suspect, place, delta, name, array)


def finite_differences(suspect: Suspect) -> Iterator[tuple[Place, np.ndarray]]:
    """Flax's value less torch's, at the places where both are finite numbers of one shape."""
    for place in floats(suspect):
        mine, theirs = suspect.trial.expected[place], suspect.trial.actual[place]
        if mine.shape == theirs.shape and np.isfinite(mine).all() and np.isfinite(theirs).all():
            yield place, theirs - mine


def addends(suspect: Suspect, shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """The values at hand, and the module's own parameters, that may stand in a sum of this shape."""
    own = [(weight.path, weight.flax) for weight in suspect.weights if weight.flax.dtype.kind == "f"]
    for name, array in [*own, *known_values(suspect)]:
        try:
            fits = np.broadcast_shapes(array.shape, shape) == shape
        except ValueError:
            continue
        if fits and array.size > 1:
            yield name, np.broadcast_to(array, shape).astype(np.float64)


def in_part(suspect: Suspect, place: Place, delta: np.ndarray, name: str, array: np.ndarray) -> Iterator[Variant]:
    """A term that is not added at some positions along an axis, or that is moved along it."""
    mine = suspect.trial.expected[place]
    for axis in range(delta.ndim):
        others = tuple(i for i in range(delta.ndim) if i != axis)
        wrong = (np.abs(delta) > 1e-9 * np.abs(array).max()).any(others)
        if 0 < wrong.sum() < wrong.size:
            rows = np.flatnonzero(wrong)
            said = f"position {rows[0]}" if rows.size == 1 else f"{rows.size} positions from {rows[0]} on"
            shown = np.expand_dims(wrong, others)
            text = f"{place} lacks {name} at {said} along axis {axis}"
            yield Variant(text, f"add {name} there too", at(place, mine - array * shown))
        for step in (1, -1) if delta.shape[axis] > 1 else ():
            moved = np.roll(array, step, axis)
            if not np.array_equal(moved, array):
                text = f"{place} has {name} added moved by {step} along axis {axis}"
                yield Variant(text, f"add {name} in torch's order", at(place, mine - array + moved))


def unguarded(suspect: Suspect) -> Iterator[Variant]:
    """A bound that keeps a root, a logarithm or a division from what it cannot take, forgotten."""
    for op in suspect.named("clamp", "clamp_min", "clamp_max", "maximum", "minimum", "nan_to_num"):
        if len(op.shapes) == 1 or op.shapes[0] == op.shape:
            yield Variant(
                f"Flax leaves out the bound that torch sets by {op.name.rstrip('_')}",
                f"bound it as torch does: jnp.{'nan_to_num' if op.name.startswith('nan') else 'clip'}",
                suspect.edited([op], "left out"),
            )
        bound = op.args[1] if len(op.args) > 1 else None
        if isinstance(bound, float) and 0 < bound <= 1e-2 and not op.name.startswith("clamp_max"):
            yield Variant(
                f"{bound:g} is added in Flax where torch takes no less than it",
                f"jnp.maximum(x, {bound:g})",
                suspect.edited([op], "plus", by=bound),
            )


def one_sided(suspect: Suspect) -> Iterator[Variant]:
    """NaN or infinity on one side, beside numbers that agree: where nothing tells what makes it, that is all that is wrong."""
    values, sides = {}, set[str]()
    for place in suspect.differing:
        mine, theirs = suspect.trial.expected.get(place), suspect.trial.actual.get(place)
        if not is_array(mine) or not comparable(theirs, mine) or mine.dtype.kind != "f":
            return
        apart = ~same_specials(theirs, mine)
        if not apart.any():
            return
        values[place] = np.where(apart, theirs, mine)
        sides |= {"Flax" if not np.isfinite(theirs[apart]).all() else "torch"}
    if len(sides) == 1:
        side, other = ("Flax", "torch") if sides == {"Flax"} else ("torch", "Flax")
        yield Variant(
            f"{side} has NaN or infinity where {other} has other numbers; all else agrees",
            "look at what divides, takes a root or a logarithm, or hides a whole row, and write it as torch does",
            lambda: values,
        )


def scaling(suspect: Suspect) -> Iterator[Variant]:
    """A value that is torch's times a number; a number by which torch multiplies or divides, forgotten or taken twice."""
    yield from factor(suspect)
    for op in suspect.named("mul", "div"):
        number = op.args[1] if len(op.args) > 1 else None
        does, other = ("multiply", "divide") if op.name.startswith("mul") else ("divide", "multiply")
        if len(op.shapes) == 2:
            taken, wanted = ("quotient", "product") if does == "multiply" else ("product", "quotient")
            what = f"Flax takes the {taken} of two arrays where torch takes their {wanted}"
            yield Variant(what, f"{does} the first by the second", suspect.edited([op], "inverted"))
        if not isinstance(number, int | float) or not number:
            continue
        by = number if does == "multiply" else 1 / number
        name = named_factor(number, op.shape)
        for edit, settings, what in (
            ("left out", {}, f"Flax does not {does} by {name}"),
            ("scaled output", {"factor": by}, f"Flax {does}s by {name} twice"),
            ("scaled output", {"factor": by**-2}, f"Flax {other}s by {name}"),
        ):
            yield Variant(what, f"{does} by {name}, once", suspect.edited([op], edit, **settings))
    for place, delta in finite_differences(suspect):
        for name, array in addends(suspect, delta.shape):
            share = float((delta * array).sum() / ((array * array).sum() or 1.0))
            # What is left out or taken twice is told as that.
            if share and not any(math.isclose(share, whole, rel_tol=1e-9) for whole in (1, -1)):
                text = f"{place} has {named_factor(1 + share, array.shape)} times {name} added"
                value = suspect.trial.expected[place] + share * array
                yield Variant(text, f"add {name} as it is", at(place, value))
