"""Positions that are told otherwise: another base, another direction, another first position, other pairs of channels."""

import math
from collections.abc import Iterator
from typing import Any

from parity.evidence.calls import Operation
from parity.evidence.hypotheses.suspect import Edited, Edits, Suspect, Variant, groups
from parity.evidence.hypotheses.tensors import told_pairs

# Bases in use: of the first Transformer, of LLaMA's generations, of models for long texts.
BASES = (10000.0, 500000.0, 1000000.0, 1000.0, 100.0)
# First positions: counted from 1, behind one or two special tokens, one early.
SHIFTS = (1, -1, 2, -2, 3, 4)


def positions(suspect: Suspect) -> Iterator[Variant]:
    """The angles of rotary or sinusoidal positions: base, direction, sine for cosine, the first position."""
    sines, cosines = suspect.named("sin"), suspect.named("cos")
    if not sines and not cosines:
        return
    yield from frequencies(suspect)
    turned: Edits = {op.number: ("scaled output", {"factor": -1.0}) for op in sines}
    yield Variant(
        "positions turn the other way round: the sine has the other sign", "x1 * cos - x2 * sin", Edited(suspect, turned)
    )
    others = [(op, "cosine") for op in sines] + [(op, "sine") for op in cosines]
    exchanged: Edits = {op.number: ("activation", {"to": other}) for op, other in others}
    yield Variant("sine and cosine of the positions are exchanged", "exchange them back", Edited(suspect, exchanged))
    yield from not_turned(suspect, sines, cosines)
    yield from first_position(suspect)


def not_turned(suspect: Suspect, sines: list[Operation], cosines: list[Operation]) -> Iterator[Variant]:
    """Of several arrays that are turned, all or one left as they are: angles of zero."""
    pairs = list(zip(cosines, sines)) if len(cosines) == len(sines) else []
    for where, chosen in groups(cosines if pairs else []):
        flat = [(sine, 0.0) for cosine, sine in pairs if cosine in chosen] + [(cosine, 1.0) for cosine in chosen]
        yield Variant(
            f"positions are left out: the angles are zero in Flax{where}",
            "turn queries and keys as torch does",
            suspect.edited_each((op, "filled", {"value": value}) for op, value in flat),
        )


def first_position(suspect: Suspect) -> Iterator[Variant]:
    for op in suspect.named("arange"):
        for by in SHIFTS:
            what = f"positions are counted from {by:+d} where torch counts from 0"
            yield Variant(what, f"subtract {by}", suspect.edited([op], "shifted output", by=by))
    for op in suspect.named("slice"):
        start, end = (op.args[2] if len(op.args) > 2 else 0) or 0, op.args[3] if len(op.args) > 3 else None
        if not isinstance(end, int) or end > 2**31 or op.shapes[0][op.args[1] if len(op.args) > 1 else 0] < end + 1:
            continue
        for by in (1, 2):
            edits: Edits = {op.number: ("moved slice", {"start": start + by, "end": end + by})}
            yield Variant(
                f"a table is read from row {start + by} where torch reads from {start}",
                f"subtract {by}",
                Edited(suspect, edits),
            )


def frequencies(suspect: Suspect) -> Iterator[Variant]:
    """Another base of the frequencies: of a power, inside an exponential, or of a table that torch keeps."""
    # Queries and keys may each have a power of their own.
    powers = [op for op in suspect.named("pow") if op.args and isinstance(op.args[0], int | float) and op.args[0] > 1]
    for _, chosen in groups(powers):

        def power(number: float, chosen: list[Operation] = chosen) -> Any:
            return suspect.edited(chosen, "argument", index=0, value=number)()

        yield from other_bases(suspect, power, float(chosen[0].args[0])) if chosen else ()
    for _, chosen in groups(suspect.named("exp")):
        # exp(i * -log(base) / d): a factor of the exponent is another logarithm of the base.
        def exponential(number: float, chosen: list[Operation] = chosen) -> Any:
            factor = math.log(number) / math.log(BASES[0]) if number > 0 else math.nan
            return suspect.edited(chosen, "scaled input", factor=factor)()

        yield from other_bases(suspect, exponential, BASES[0]) if chosen else ()
    yield from other_steps(suspect)
    for leaf in suspect.unpaired_weights:
        if "freq" in leaf.name:
            table = leaf.read()

            def kept(number: float, path: str = leaf.path, table: Any = table) -> Any:
                return suspect.again(weights={path: table ** (math.log(number) / math.log(BASES[0]))})

            yield from other_bases(suspect, kept, BASES[0])


def other_steps(suspect: Suspect) -> Iterator[Variant]:
    """Exponents of the frequencies that are divided by one more or less, so that the last ends elsewhere."""
    ways = [(op, 0) for op in suspect.named("exp")] + [(op, 1) for op in suspect.named("pow") if op.args[0] is not None]
    for op, operand in ways:
        count = op.shape[-1] if op.shape else 0
        for mine, other in ((count, count - 1), (count, count + 1), (count - 1, count)) if count > 2 else ():
            yield Variant(
                f"the exponents of the frequencies are divided by {other} in Flax where torch divides by {mine}",
                "divide them as torch does: by half the width, or by one less",
                suspect.edited([op], "scaled operand", operand=operand, factor=mine / other),
            )


def other_bases(suspect: Suspect, values: Any, mine: float) -> Iterator[Variant]:
    tried = [number for number in BASES if number != mine]
    if not any(suspect.explained(values(number))[0] for number in tried):
        found = suspect.solved(values, [mine, *tried])
        tried = [float(f"{found:.6g}"), found] if found is not None else []
    for number in tried:
        what = f"the frequencies of positions have the base {number:.6g} in Flax, {mine:g} in torch"
        yield Variant(what, f"set the base to {mine:g}", lambda n=number: values(n))


def halves_or_neighbours(suspect: Suspect) -> Iterator[Variant]:
    """A rotation in a module's own code that pairs neighbouring channels where torch pairs halves, or the other way round."""
    slices = [op for op in suspect.named("slice") if op.shapes and len(op.args) > 1 and on_channels(op, op.args[1])]
    cuts = [op for op in suspect.named("split", "chunk") if op.shapes and op.shape and op.shape[-1] * 2 == op.shapes[0][-1]]
    pairs = [op for op in slices if op.shape[-1] * 2 == op.shapes[0][-1]]
    behind = [op for op in pairs if step(op) == 1]
    in_turn = [op for op in pairs if step(op) == 2]
    joined = suspect.named("cat")
    stacked = suspect.named("stack")
    if (behind or cuts) and joined:
        pieces: list[tuple[Operation, str, dict[str, Any]]] = [(op, "half", {"neighbours": True}) for op in behind]
        pieces += [(op, "halves", {}) for op in cuts] + [(op, "interleaved", {}) for op in joined]
        edits: Edits = {op.number: (edit, settings) for op, edit, settings in pieces}
        yield told_pairs(suspect, "neighbouring channels", "the two halves", Edited(suspect, edits))
    if in_turn and stacked:
        pieces = [(op, "half", {"neighbours": False}) for op in in_turn]
        pieces += [(op, "behind each other", {}) for op in stacked]
        edits = {op.number: (edit, settings) for op, edit, settings in pieces}
        yield told_pairs(suspect, "the two halves of channels", "neighbours", Edited(suspect, edits))


def on_channels(op: Operation, dim: Any) -> bool:
    return isinstance(dim, int) and dim % len(op.shapes[0]) == len(op.shapes[0]) - 1


def step(op: Operation) -> int:
    return op.args[4] if len(op.args) > 4 else 1
