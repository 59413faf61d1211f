"""Masks and ids that a module gives others, and that are not torch's."""

import itertools
from collections.abc import Iterator

import numpy as np

from parity.evidence.hypotheses.suspect import Suspect, Variant
from parity.evidence.hypotheses.tensors import at
from parity.evidence.trial import PLAIN, Place, is_array, like


def given_masks(suspect: Suspect) -> Iterator[Variant]:
    """A mask that shows other places than torch's."""
    for place in whole_numbers(suspect, "b"):
        mine = suspect.trial.expected[place]
        yield Variant(f"{place} is inverted", "invert the mask once: ~mask", at(place, ~mine))
        for axis, word in ((-1, "key"), (-2, "query")):
            for step in (1, -1) if mine.ndim >= -axis else ():
                moved = np.roll(mine, step, axis)
                yield Variant(f"{place} is shifted by one {word}", f"line it up with the {word}s", at(place, moved))
        if mine.ndim > 1 and mine.shape[-1] == mine.shape[-2]:
            yield Variant(f"{place} has queries and keys exchanged", "mask[query, key]", at(place, mine.swapaxes(-1, -2)))
        if mine.ndim == 4 and mine.shape[0] > 1 and (mine == mine[:, :1, :1]).all():
            rows, text = mine[:, 0, 0][None, None], f"{place}: a mask (batch, keys) is read as (queries, keys)"
            for way, said in ((rows, ""), (~rows, ", and inverted")):
                yield Variant(f"{text}{said}", "mask[:, None, None, :]", at(place, like(way, mine)))
        yield from parts(suspect, place, mine)
        yield from diagonals(place, mine)


def diagonals(place: Place, mine: np.ndarray) -> Iterator[Variant]:
    """A causal mask with its diagonal elsewhere, alone or beside what else is hidden."""
    if mine.ndim < 2 or mine.shape[-2] < 2:
        return
    rows, columns = mine.shape[-2:]
    for step in range(-2, 3):
        for offset in dict.fromkeys((step, columns - rows + step)):
            below = np.tril(np.ones((rows, columns), bool), offset)
            for pattern in (below, ~below):
                for joined in (np.broadcast_to(pattern, mine.shape), mine & pattern, mine | pattern):
                    yield Variant(
                        f"{place}: the diagonal of the causal mask is not where torch has it",
                        "move it by the k of jnp.tril or jnp.triu",
                        at(place, joined),
                    )


def parts(suspect: Suspect, place: Place, mine: np.ndarray) -> Iterator[Variant]:
    """Some of the masks at hand, in place of all of them."""
    known = [(name, array) for name, array in suspect.known() if array.dtype == bool and array.ndim > 1]
    found: dict[bytes, tuple[str, np.ndarray]] = {}
    for name, array in known:
        spread = array[:, None, None, :] if array.ndim == 2 and mine.ndim == 4 and array.shape[0] == mine.shape[0] else array
        for one in (spread, ~spread):
            if fits(one, mine):
                found.setdefault(np.broadcast_to(one, mine.shape).tobytes(), (name, np.broadcast_to(one, mine.shape)))
    for source, mask in found.values():
        yield Variant(f"{place} comes from {source} alone", "join all masks that torch joins", at(place, mask))
    yield Variant(f"{place} shows everything", "pass the mask on", at(place, np.ones_like(mine)))
    yield Variant(f"{place} is False everywhere", "pass the mask on", at(place, np.zeros_like(mine)))
    for (first, a), (second, b) in itertools.permutations(found.values(), 2):
        for joined in (a & b, a | b):
            yield Variant(f"{place} joins {first} and {second} otherwise", "join the masks as torch does", at(place, joined))


def fits(one: np.ndarray, other: np.ndarray) -> bool:
    try:
        return np.broadcast_shapes(one.shape, other.shape) == other.shape
    except ValueError:
        return False


def ids(suspect: Suspect) -> Iterator[Variant]:
    """Whole numbers (positions, tokens, types) that are moved or shifted."""
    for place in whole_numbers(suspect, "iu"):
        mine, theirs = suspect.trial.expected[place].astype(np.int64), suspect.trial.actual[place].astype(np.int64)
        shift = int((theirs - mine).flat[0]) if mine.shape == theirs.shape and mine.size else 0
        if shift:
            yield Variant(f"{place} is torch's plus {shift}", f"subtract {shift}", at(place, mine + shift))
        for axis in range(mine.ndim) if mine.shape == theirs.shape else ():
            for step in (1, -1):
                yield Variant(
                    f"{place} is moved by {step} along axis {axis}", "move it back", at(place, np.roll(mine, step, axis))
                )
            yield Variant(f"{place} runs backwards along axis {axis}", "turn it round", at(place, np.flip(mine, axis)))


def settings(suspect: Suspect) -> Iterator[Variant]:
    """A number or a word, no array, that is not torch's."""
    for place in suspect.differing:
        mine, theirs = suspect.trial.expected.get(place), suspect.trial.actual.get(place)
        if isinstance(mine, PLAIN) and isinstance(theirs, PLAIN):
            yield Variant(f"{place} is {theirs!r} where torch gives {mine!r}", f"pass {mine!r}", at(place, theirs))


def whole_numbers(suspect: Suspect, kinds: str) -> list[Place]:
    """The differing places that hold no floating point numbers on either side."""
    both = (suspect.trial.expected, suspect.trial.actual)
    return [p for p in suspect.differing if all(is_array(side.get(p)) and side[p].dtype.kind in kinds for side in both)]
