"""Scores that are scaled or hidden otherwise."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from parity.evidence.calls import Operation, fingerprint
from parity.evidence.hypotheses.suspect import Edited, Edits, Suspect, Variant, groups
from parity.evidence.hypotheses.tensors import named_factor


def softmax_scale(suspect: Suspect) -> Iterator[Variant]:
    """Scores that are scaled otherwise before softmax."""
    for where, chosen in groups(suspect.named("softmax", "safe_softmax")):
        if not chosen:
            continue

        def values(number: float, chosen: list[Operation] = chosen) -> Any:
            return suspect.edited(chosen, "scaled input", factor=number)()

        for number, name in factors(suspect):
            yield Variant(f"Flax's scores are {name} times torch's{where}", told_scale(number), lambda n=number, v=values: v(n))
        found = suspect.solved(values, (1.0, 2.0, 0.5, 4.0, 0.25))
        if found is not None and not any(math.isclose(found, n, rel_tol=1e-9) for n, _ in factors(suspect)):
            yield Variant(
                f"Flax's scores are {named_factor(found, ())} times torch's{where}",
                f"multiply the scores by {named_factor(1 / found, ())}",
                lambda n=found, v=values: v(n),
            )


def factors(suspect: Suspect) -> list[tuple[float, str]]:
    """The factors by which a scale may be wrong: sizes, their roots, their ratios' roots."""
    sizes = {shape[-1] for op in suspect.named("bmm", "baddbmm", "mm") for shape in op.shapes if shape}
    sizes |= {op.shape[-1] for op in suspect.operations if op.name in ("view", "unsafe_view", "_unsafe_view") and op.shape}
    sizes |= {shape[-1] for op in suspect.operations for shape in op.shapes if len(shape) > 2}
    found: dict[float, str] = {}
    for size in sorted(s for s in sizes if s > 1):
        for number, name in (
            (size**0.5, f"sqrt({size})"),
            (size**-0.5, f"1/sqrt({size})"),
            (float(size), f"{size}"),
            (1 / size, f"1/{size}"),
        ):
            found.setdefault(number, name)
    for a, b in itertools.permutations(sorted(s for s in sizes if s > 1), 2):
        found.setdefault((a / b) ** 0.5, f"sqrt({a}/{b})")
    return [(number, name) for number, name in found.items() if number != 1]


def told_scale(number: float) -> str:
    if number > 1:
        return "divide the scores as torch does: by the root of the head width, once, unless torch's code says otherwise"
    return "scale the scores once, by the root that torch's code takes"


def masking(suspect: Suspect) -> Iterator[Variant]:
    """A mask that hides other places, or that works otherwise."""
    safe: Edits = {op.number: ("softmax", {"hidden": "nan"}) for op in suspect.named("safe_softmax")}
    if safe and suspect.explained(suspect.again(safe))[0]:
        # Where NaN in rows that see nothing is all that differs, the mask is right.
        return
    ops = [
        op
        for op in suspect.operations
        if op.masks and op.name.rstrip("_") in ("masked_fill", "where", "add", "baddbmm", "bitwise_not", "logical_not")
    ]
    for where, chosen in groups(ops):
        if not chosen or any(hides_by(op) != hides_by(chosen[0]) for op in chosen):
            continue
        # Where a mask of numbers is made, what fills it with others comes to the same as leaving it out.
        made = all(op.operands.get((0,)) == fingerprint(np.zeros(op.shapes[0])) for op in chosen)
        yield from not_used(suspect, chosen, where) if made else ()
        yield from other_fills(suspect, chosen, where)
        yield from weak_fills(suspect, chosen, where) if hides_by(chosen[0]) == "add" else ()
        for variant in itertools.chain(() if made else not_used(suspect, chosen, where), other_masks(suspect, chosen, where)):
            yield variant
            yield from then_nan(suspect, variant)
    yield from behind(suspect, ops)
    if not ops:
        yield from where_torch_has_none(suspect)
    for op in suspect.named("add", "baddbmm"):
        if op.switches and len(op.shapes) == (3 if op.name.startswith("baddbmm") else 2):
            for shows in (True, False):
                yield Variant(
                    f"a mask of 0 and 1 is a switch in Flax, {'1 shows' if shows else '1 hides'}; torch adds its numbers",
                    "add the mask to the scores, as torch does with masks that are no booleans",
                    suspect.edited([op], "number as mask", shows=shows),
                )
    yield from joined(suspect)


def hides_by(op: Operation) -> str:
    """How an operation hides: `where` that puts one number in the place of scores is a masked fill, as said otherwise."""
    name = op.name.rstrip("_")
    return "where as fill" if name == "where" and op.shape and () in op.shapes[1:] else name


def hiding(suspect: Suspect, chosen: list[Operation], edit: str, **settings: Any) -> Edited:
    """An edit of masked fills, or of what fills in other words."""
    if hides_by(chosen[0]) == "where as fill":
        return suspect.edited(chosen, "as masked fill", inner=edit, settings=settings)
    return suspect.edited(chosen, edit, **settings)


def where_torch_has_none(suspect: Suspect) -> Iterator[Variant]:
    """A causal mask that torch has not, as with a single query that sees all keys before it."""
    for softmax in suspect.named("softmax", "safe_softmax"):
        shape = softmax.shape
        for steps in diagonals(shape) if len(shape) > 1 and shape[-1] > 1 else ():
            yield Variant(
                f"a causal mask, {told_diagonal(steps, shape)}, hides what torch shows: it has no mask",
                "leave is_causal or the mask out: a single query sees every key that is there",
                suspect.edited([softmax], "causal", steps=steps),
            )


JOINS = ("bitwise_or", "bitwise_and", "logical_or", "logical_and", "mul")


def joined(suspect: Suspect) -> Iterator[Variant]:
    """Two masks that are joined otherwise, or one of which is left out or is another, such as a causal one beside padding."""
    for op in suspect.named(*JOINS):
        if op.dtypes[:2] != ("bool", "bool"):
            continue
        for way in ("or", "and", "xor"):
            if way not in op.name:
                edit = suspect.edited([op], "logic", way=way)
                yield Variant(f"Flax joins two masks by {way}", f"join them as torch does: {op.name}", edit)
        for at, word in ((0, "first"), (1, "second")):
            shape, which = op.shapes[at], f", the {word} of two that are joined"
            left = suspect.edited([op], "other operand" if at == 0 else "left out")
            yield Variant(f"a mask is not used{which}", "join all masks that torch joins", left)
            for way, what, change in ways_of(shape):
                yield Variant(f"{what}{which}", change, suspect.edited([op], "mask", way=way, at=at))
            for way in ("causal", "causal shown") if len(shape) > 1 and shape[-2] > 1 else ():
                for steps in diagonals(shape):
                    yield Variant(
                        f"the causal mask is {told_diagonal(steps, shape)}{which}",
                        "line the diagonal up as torch does: jnp.tril(..., k=...)",
                        suspect.edited([op], "mask", way=way, at=at, steps=steps),
                    )


def diagonals(shape: tuple[int, ...]) -> list[int]:
    """By how much the diagonal of a causal mask may be moved: for as many queries as keys, and for fewer."""
    rest = shape[-1] - shape[-2]
    return sorted({0, rest, 1, -1, rest - 1, rest + 1})


def told_diagonal(steps: int, shape: tuple[int, ...]) -> str:
    at_the = {0: "lined up at the top left", shape[-1] - shape[-2]: "lined up at the bottom right"}
    return at_the.get(steps, f"moved by {steps}")


def then_nan(suspect: Suspect, variant: Variant) -> Iterator[Variant]:
    """The same, where torch gives zeros to a query that then sees no key, and Flax NaN."""
    assert isinstance(variant.values, Edited)
    safe: Edits = {op.number: ("softmax", {"hidden": "nan"}) for op in suspect.named("safe_softmax")}
    if safe:
        what = f"{variant.what}; a query that then sees no key gets NaN"
        yield Variant(what, variant.change, Edited(suspect, {**variant.values.edits, **safe}))


def behind(suspect: Suspect, ops: list[Operation]) -> Iterator[Variant]:
    """A mask that is applied to the weights, when softmax has counted what it hides."""
    places = {name: place for name, place in PLACES.items() if name not in FILLING[1:]}
    for softmax in suspect.named("softmax", "safe_softmax"):
        before = [op for op in ops if op.number < softmax.number and op.name.rstrip("_") in places]
        for share in (False, True) if before else ():
            aside: dict[str, Any] = {}
            mask = before[-1]
            edits: Edits = {
                mask.number: ("set aside", {"aside": aside, "at": places[mask.name.rstrip("_")]}),
                softmax.number: ("hidden behind", {"aside": aside, "share": share}),
            }
            rest = ", and the rest is brought back to a sum of 1" if share else ""
            yield Variant(
                f"the mask is applied behind softmax, to the weights{rest}",
                "hide the scores before softmax: jnp.where(mask, scores, -inf)",
                Edited(suspect, edits),
            )


def ways_of(shape: tuple[int, ...], scores: tuple[int, ...] = ()) -> list[tuple[str, str, str]]:
    """What may be done to a mask of that shape, on scores of that: the edit, in words, and what to do."""
    ways = [
        (
            "inverted",
            "the mask is inverted",
            "hide where torch hides: Flax's masks are True where attention is allowed, torch's often where it is not",
        )
    ]
    if shape and shape[-1] > 1:
        ways += [("shifted left", "the mask is shifted by one key", "line it up with the keys")]
        ways += [("shifted right", "the mask is shifted by one key", "line it up with the keys")]
        ways += [("reversed", "the mask runs backwards along the keys", "turn it round")]
    if len(shape) > 1 and shape[-2] > 1:
        ways += [("shifted up", "the mask is shifted by one query", "line it up with the queries")]
        ways += [("shifted down", "the mask is shifted by one query", "line it up with the queries")]
        if shape[-1] == shape[-2]:
            ways += [("transposed", "the mask has queries and keys exchanged", "mask[query, key]")]
    if shape[-2:-1] == (1,) and shape[-1] > 1 and scores[-2:] == (shape[-1],) * 2:
        ways += [("transposed", "the mask hides queries in place of keys", "mask[..., None, :]")]
    return ways


# Keys beyond which not every width of a window is tried.
MOST_KEYS = 64
# The place of the mask among the operands of what hides.
PLACES = {"masked_fill": 1, "where as fill": 1, "where": 0, "add": 1}
FILLING = ("masked_fill", "where as fill")


def other_masks(suspect: Suspect, chosen: list[Operation], where: str) -> Iterator[Variant]:
    name = hides_by(chosen[0])
    if name not in PLACES:
        return
    # A fill in other words has the mask in front.
    place, given = PLACES[name], 0 if name == "where as fill" else PLACES[name]
    shape, scores = chosen[0].shapes[min(given, len(chosen[0].shapes) - 1)], chosen[0].shape
    for way, what, change in ways_of(shape, scores):
        yield Variant(f"{what}{where}", change, hiding(suspect, chosen, "mask", way=way, at=place))
    if len(shape) == 4 and shape[1] == shape[2] == 1 and shape[0] > 1:
        yield Variant(
            f"a mask (batch, keys) is read as (queries, keys){where}",
            "mask[:, None, None, :]",
            hiding(suspect, chosen, "mask", way="broadcast over queries", at=place),
        )
    if len(shape) > 1 and shape[-2] > 1:
        for steps in diagonals(shape):
            yield Variant(
                f"the causal mask is {told_diagonal(steps, shape)}{where}",
                "line the diagonal up as torch does: jnp.tril(..., k=...)",
                hiding(suspect, chosen, "mask", way="causal", at=place, steps=steps),
            )
        for width in range(1, min(shape[-1], MOST_KEYS)):
            yield Variant(
                f"a window of {width} keys, the query's own among them, hides what torch shows{where}",
                "show all keys that torch shows: leave the window out",
                hiding(suspect, chosen, "mask", way="window", at=place, steps=width),
            )
        for does, end in itertools.product(("shows", "hides"), ("before", "behind", "at both ends")):
            yield Variant(
                f"the mask {does} one key more {end}{where}",
                "let it end where torch's does",
                hiding(suspect, chosen, "mask", way=f"{does} one more {end}", at=place),
            )
    if name == "add":
        yield Variant(f"the mask is added twice{where}", "add it once", suspect.edited(chosen, "twice", operand=1))


def not_used(suspect: Suspect, chosen: list[Operation], where: str) -> Iterator[Variant]:
    """The mask left out, or added as numbers: told before the fills that come to the same."""
    name = hides_by(chosen[0])
    if name in (*FILLING, "add"):
        yield Variant(f"the mask is not used{where}", "pass the mask on", hiding(suspect, chosen, "left out"))
    for sign in (1.0, -1.0) if name in FILLING else ():
        meaning = "1 where torch hides" if sign > 0 else "0 where torch hides"
        yield Variant(
            f"the mask is added to the scores as numbers, {meaning}{where}",
            "hide by jnp.where(mask, scores, -inf)",
            hiding(suspect, chosen, "mask as number", sign=sign),
        )


FILLS = (float("-inf"), -1e20, -1e9, -1e10, -3.4028234663852886e38, -1.7976931348623157e308, -1e4, -1e30, -1e6)
# Numbers that hide nothing: a mask that multiplies the scores leaves 0 there.
WEAK = (0.0, -1.0, -10.0, -100.0, -1e3, -1e5)
WEAKEST = 1e5


def solved_fill(suspect: Suspect, edited: Callable[[float], Edited]) -> tuple[float, ...]:
    """The number in hidden places that fits, if it is weak and none of the usual ones."""
    if any(suspect.explained(edited(value)())[0] for value in WEAK):
        return ()
    found = suspect.solved_near(lambda value: edited(value)(), (-1.0, -2.0, -4.0, -6.0, -9.0, -12.0, -30.0))
    return () if found is None or abs(found) > WEAKEST else tuple(dict.fromkeys((float(f"{found:.3g}"), found)))


def other_fills(suspect: Suspect, chosen: list[Operation], where: str) -> Iterator[Variant]:
    """Another number in hidden places; it shows where a query sees nothing."""
    if hides_by(chosen[0]) not in FILLING:
        return
    # What is given as an array is not on the record.
    mine = next(iter(chosen[0].args[2:3]), None) if hides_by(chosen[0]) == "masked_fill" else None
    own = f"{mine:g}" if mine is not None else "another number"
    for value in (*FILLS, *WEAK, *solved_fill(suspect, lambda v: hiding(suspect, chosen, "argument", index=2, value=v))):
        if value != mine:
            finite = f"finite in Flax, as {value:g}," if mine is not None and math.isinf(mine) else f"{value:g} in Flax"
            got = "NaN" if math.isinf(value) else "the average of all values"
            got = "no place is hidden" if abs(value) <= WEAKEST else f"a query that sees nothing gets {got}"
            fill = "torch's own number" if mine is None else own
            yield Variant(
                f"hidden scores are {finite} and {own} in torch{where}: {got}",
                f"fill with {fill}",
                hiding(suspect, chosen, "argument", index=2, value=value),
            )
            # Less 1 where hidden is, behind softmax, a mask of 0 and 1 that is added: told as that.
            if math.isfinite(value) and value not in (0, -1):
                yield Variant(
                    f"{value:g} is added to hidden scores in Flax, torch puts {own} in their place{where}",
                    f"jnp.where(mask, {fill}, scores)",
                    hiding(suspect, chosen, "fill added", value=value),
                )


def weak_fills(suspect: Suspect, chosen: list[Operation], where: str) -> Iterator[Variant]:
    """Hidden scores that are set to a number, where torch adds a mask of minus infinity."""
    for value in (*WEAK, *FILLS, *solved_fill(suspect, lambda v: suspect.edited(chosen, "refilled", value=v))):
        yield Variant(
            f"hidden scores are {value:g} in Flax where torch adds its mask{where}",
            "hide by jnp.where(mask, scores, -jnp.inf)",
            suspect.edited(chosen, "refilled", value=value),
        )


def hidden_rows(suspect: Suspect) -> Iterator[Variant]:
    """What a query gets that sees no key."""
    words = {"uniform": "the average of all values", "zero": "zeros", "nan": "NaN"}
    for where, chosen in groups(suspect.named("softmax", "safe_softmax")):
        for hidden, what in words.items() if chosen else ():
            yield Variant(
                f"a query that sees no key gets {what} in Flax{where}",
                "give such queries what torch gives them: its fill value, and softmax as it stands",
                suspect.edited(chosen, "softmax", hidden=hidden),
            )
