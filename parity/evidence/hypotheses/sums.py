"""A term or a factor forgotten, or taken twice."""

from collections.abc import Iterator

from parity.evidence.hypotheses.suspect import Suspect, Variant
from parity.evidence.hypotheses.tensors import factor, named_factor


def summing(suspect: Suspect) -> Iterator[Variant]:
    """An operand of a sum left out, or taken twice."""
    for op in suspect.named("add", "sub"):
        if len(op.shapes) == 2 and op.shapes[0] == op.shapes[1]:
            for edit in ("left out", "other operand"):
                yield Variant("one term of a sum is not added", "add both", suspect.edited([op], edit))
            for operand in (0, 1):
                yield Variant("one term of a sum is added twice", "add it once", suspect.edited([op], "twice", operand=operand))


def scaling(suspect: Suspect) -> Iterator[Variant]:
    """A value that is torch's times a number; a number by which torch multiplies or divides, forgotten or taken twice."""
    yield from factor(suspect)
    for op in suspect.named("mul", "div"):
        number = op.args[1] if len(op.args) > 1 else None
        if not isinstance(number, int | float) or not number:
            continue
        does, other, by = ("multiply", "divide", number) if op.name.startswith("mul") else ("divide", "multiply", 1 / number)
        name = named_factor(number, op.shape)
        for edit, settings, what in (
            ("left out", {}, f"Flax does not {does} by {name}"),
            ("scaled output", {"factor": by}, f"Flax {does}s by {name} twice"),
            ("scaled output", {"factor": by**-2}, f"Flax {other}s by {name}"),
        ):
            yield Variant(what, f"{does} by {name}, once", suspect.edited([op], edit, **settings))
