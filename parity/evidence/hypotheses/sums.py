"""A term or a factor forgotten, or taken twice."""

from collections.abc import Iterator

from parity.evidence.hypotheses.suspect import Suspect, Variant


def summing(suspect: Suspect) -> Iterator[Variant]:
    """An operand of a sum or product left out, or taken twice, or a factor forgotten."""
    for op in suspect.operations:
        name = op.name.rstrip("_")
        if name in ("add", "sub") and len(op.shapes) == 2 and op.shapes[0] == op.shapes[1]:
            yield Variant("one term of a sum is not added", "add both", suspect.edited([op], "left out"))
            yield Variant("one term of a sum is not added", "add both", suspect.edited([op], "other operand"))
            for operand in (0, 1):
                yield Variant("one term of a sum is added twice", "add it once", suspect.edited([op], "twice", operand=operand))
        if name in ("mul", "div") and len(op.args) > 1 and isinstance(op.args[1], int | float):
            number = op.args[1]
            yield Variant(
                f"Flax does not {'multiply' if name == 'mul' else 'divide'} by {number:.6g}",
                f"{'multiply' if name == 'mul' else 'divide'} by {number:.6g}",
                suspect.edited([op], "left out"),
            )
            again = number if name == "mul" else 1 / number
            yield Variant(
                f"Flax {'multiplies' if name == 'mul' else 'divides'} by {number:.6g} twice",
                "do so once",
                suspect.edited([op], "scaled output", factor=again),
            )
            yield Variant(
                f"Flax {'divides' if name == 'mul' else 'multiplies'} by {number:.6g} instead",
                f"{'multiply' if name == 'mul' else 'divide'} by it",
                suspect.edited([op], "scaled output", factor=1 / again**2),
            )
