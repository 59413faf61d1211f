"""A term or a factor forgotten, or taken twice."""

import math
from collections.abc import Iterator

import numpy as np

from parity.evidence.calls import Operation, fingerprint
from parity.evidence.hypotheses.suspect import Suspect, Values, Variant
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
        if len(op.shapes) == 2 and op.shapes[0] != op.shapes[1]:
            yield from spread_term(suspect, op)
    yield from numbers_added(suspect)
    for place, delta in finite_differences(suspect):
        for name, array in addends(suspect, delta.shape):
            yield from in_part(suspect, place, delta, name, array)


def spread_term(suspect: Suspect, op: Operation) -> Iterator[Variant]:
    """A term that is spread over the other, such as a bias of positions on scores: left out, of the other sign, or scaled."""
    operand = 1 if op.shapes[0] == op.shape else 0
    at_hand = [(weight.path, weight.torch.astype(np.float64)) for weight in suspect.weights] + known_values(suspect)
    number_of = op.operands.get((operand,))
    said = next((name for name, array in at_hand if fingerprint(array) == number_of), "")
    said = said or f"the term {op.shapes[operand]} of a sum of shape {op.shape}"

    def values(number: float) -> Values:
        return suspect.edited([op], "scaled operand", operand=operand, factor=number)()

    tried = [0.0, -1.0]
    if not any(suspect.explained(values(number))[0] for number in tried):
        found = suspect.solved_near(values, (0.5, 2.0))
        found = suspect.solved_near(values, (-0.5, -2.0)) if found is None else found
        tried += [] if found is None else [float(f"{found:.6g}"), found]
    for number in tried:
        if number in (0.0, -1.0):
            what, cause = f"{said} {'has the other sign' if number else 'is not added'}", ""
        else:
            what, cause = f"Flax has {named_factor(number, op.shape)} times {said} added", "factor"
        yield Variant(what, "add it as torch does", lambda n=number: values(n), name=cause)


def numbers_added(suspect: Suspect) -> Iterator[Variant]:
    """A number that torch adds, as the 1 beside a scale that is stored around zero, forgotten or taken twice."""
    for op in suspect.named("add", "sub"):
        number = op.args[1] if len(op.args) > 1 else None
        # A small one guards a division, and is told as an epsilon.
        if len(op.shapes) != 1 or isinstance(number, bool) or not isinstance(number, int | float) or abs(number) <= 1e-2:
            continue
        does = "subtract" if op.name.startswith("sub") else "add"
        for other, said in ((0.0, f"does not {does} {number:g}"), (2 * number, f"{does}s {number:g} twice")):
            edit = suspect.edited([op], "argument", index=1, value=other)
            yield Variant(f"Flax {said} where torch does", f"{does} {number:g}, once", edit)


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
        yield from other_bounds(suspect, op)
        bound = op.args[1] if len(op.args) > 1 else None
        if isinstance(bound, float) and 0 < bound <= 1e-2 and not op.name.startswith("clamp_max"):
            yield Variant(
                f"{bound:g} is added in Flax where torch takes no less than it",
                f"jnp.maximum(x, {bound:g})",
                suspect.edited([op], "plus", by=bound),
            )


def other_bounds(suspect: Suspect, op: Operation) -> Iterator[Variant]:
    """Another bound in the same place, found from what the values show."""
    for index, name in ((1, "max" if op.name.startswith("clamp_max") else "min"), (2, "max")):
        mine = op.args[index] if len(op.args) > index else None
        if isinstance(mine, bool) or not isinstance(mine, int | float) or not math.isfinite(mine) or not mine:
            continue

        def values(number: float, index: int = index) -> Values:
            return suspect.edited([op], "argument", index=index, value=number)()

        found = suspect.solved_near(values, (mine * 0.9, mine * 1.1, mine / 2, mine * 2))
        for number in () if found is None or found == mine else dict.fromkeys((float(f"{found:.3g}"), found)):
            what = f"Flax bounds by {name}={number:.6g} where torch bounds by {mine:g}"
            yield Variant(what, f"jnp.clip(x, {name}={mine:g})", lambda n=number, v=values: v(n))


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


def one_divisor(suspect: Suspect) -> Iterator[Variant]:
    """One number by which Flax divides, where torch divides each row by its own, such as its length without padding."""
    for op in suspect.named("div"):
        if len(op.shapes) != 2 or op.shapes[0] != op.shape:
            continue

        def values(number: float, op: Operation = op) -> Values:
            return suspect.edited([op], "divided by", number=number)()

        found = suspect.solved_near(values, (1.0, 4.0, 16.0))
        for number in () if found is None else dict.fromkeys((float(f"{found:.6g}"), found)):
            what = f"Flax divides everything by {number:.6g} where torch divides by an array {op.shapes[1]}"
            yield Variant(what, "divide by the array: the sum of the mask, not the length", lambda n=number, v=values: v(n))


SAYS = {"multiply": "multiplies", "divide": "divides"}


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
            for operand, edit in ((1, "left out"), (0, "other operand")):
                # A quotient is not its divisor.
                if op.shapes[1 - operand] == op.shape and not (does == "divide" and operand == 0):
                    what = f"Flax does not {does} by the array {op.shapes[operand]} by which torch does"
                    yield Variant(what, f"{does} by it", suspect.edited([op], edit))
        if not isinstance(number, int | float) or not number:
            continue
        by = number if does == "multiply" else 1 / number
        name = named_factor(number, op.shape)
        for edit, settings, what in (
            ("left out", {}, f"Flax does not {does} by {name}"),
            ("scaled output", {"factor": by}, f"Flax {SAYS[does]} by {name} twice"),
            ("scaled output", {"factor": by**-2}, f"Flax {SAYS[other]} by {name}"),
        ):
            yield Variant(what, f"{does} by {name}, once", suspect.edited([op], edit, **settings))
    yield from one_divisor(suspect)
    for place, delta in finite_differences(suspect):
        for name, array in addends(suspect, delta.shape):
            share = float((delta * array).sum() / ((array * array).sum() or 1.0))
            # What is left out or taken twice is told as that.
            if share and not any(math.isclose(share, whole, rel_tol=1e-9) for whole in (1, -1)):
                text = f"{place} has {named_factor(1 + share, array.shape)} times {name} added"
                change, cause = f"add {name} as it is", ""
                if not added_as_it_is(suspect, array):
                    text = f"{place} is torch's and {named_factor(share, array.shape)} times {name}"
                    change, cause = f"add {name} as often as torch does", "terms"
                yield Variant(text, change, at(place, suspect.trial.expected[place] + share * array), name=cause)


def added_as_it_is(suspect: Suspect, array: np.ndarray) -> bool:
    """Whether torch adds an array itself, not a multiple of it, or it is no array that an operation takes at all."""
    number = fingerprint(array)
    takers = [op for op in suspect.operations if number in op.operands.values()]
    return not takers or any(op.name.rstrip("_") == "add" for op in takers)
