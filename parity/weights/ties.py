"""Names that are one array on one side or on both."""

from typing import Any

from parity.weights.claims import Sides
from parity.weights.files import same_bits
from parity.weights.leaf import Leaf, gathered
from parity.weights.pairs import Pair
from parity.weights.paths import natural


def follow_ties(pairs: list[Pair], targets: list[Leaf], taken: dict[str, Leaf]) -> None:
    """Count further names of a target array that is already filled as filled."""
    filled = {p.target.identity: p.source for p in pairs}
    filled |= {p.target.part.identity: p.source for p in pairs if p.target.part}
    for leaf in targets:
        if leaf.path not in taken and leaf.identity in filled:
            taken[leaf.path] = filled[leaf.identity]


def ties(pairs: list[Pair], sources: list[Leaf], sides: Sides) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The groups of source names that are one array, and the ties that only one side has."""
    lost = []
    for mine, theirs, where in (("source", "target", sides[1]), ("target", "source", sides[0])):
        by_identity: dict[Any, list[Pair]] = {}
        for p in pairs:
            by_identity.setdefault(getattr(p, mine).identity, []).append(p)
        for group in by_identity.values():
            if mine == "target" and restored(group):
                continue
            if len(group) > 1 and len({getattr(p, theirs).identity for p in group}) > 1:
                names = " and ".join(sorted((getattr(p, mine).path for p in group), key=natural))
                others = " and ".join(sorted((getattr(p, theirs).path for p in group), key=natural))
                where_ = "Flax" if where == "flax" else "torch"
                lost.append(
                    f"{names} are one array, but {others} are separate in {where_}: outputs agree, "
                    "training does not; share one parameter there"
                )
    groups: dict[Any, list[str]] = {}
    for leaf in sources:
        groups.setdefault(leaf.identity, []).append(leaf.path)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1), tuple(lost)


def conflicting_ties(pairs: list[Pair]) -> list[str]:
    """Targets that are one array, at whose names other values arrive: from several sources, or in several layouts."""
    arrays: dict[Any, dict[str, list[Pair]]] = {}
    for p in pairs:
        identity = p.target.part.identity if p.target.part else p.target.identity
        arrays.setdefault(identity, {}).setdefault(p.target.array_path, []).append(p)
    return [conflict(list(ways.values())) for ways in arrays.values() if len(ways) > 1 and not agreeing(list(ways.values()))]


def conflict(ways: list[list[Pair]]) -> str:
    """What is wrong with one array of the target under several names, given what arrives at each."""
    sources, targets = (" and ".join(getattr(p, side).path for way in ways for p in way) for side in ("source", "target"))
    if len({p.source.identity for way in ways for p in way}) > 1:
        return f"{sources} are separate arrays in the source, but {targets} are one array in the target"
    layouts = " and ".join(dict.fromkeys(p.layout.name for way in ways for p in way))
    return (
        f"{sources} are one array in the source, and {targets} in the target, but they would arrive in different layouts: "
        f"{layouts}; give the target an array for each, or use the one as the source does"
    )


def agreeing(ways: list[list[Pair]]) -> bool:
    """Whether the same bits arrive at each name of one array. Arrays are read only if nothing else tells."""
    if len({tuple((p.source.identity, p.layout, p.target.part and p.target.part.spans) for p in way) for way in ways}) == 1:
        return True
    if any(p.source.unreadable for way in ways for p in way):
        # Told elsewhere.
        return True
    if len({p.source.dtype for way in ways for p in way}) > 1:
        return False
    try:
        whole = [gathered((p.target, p.layout.apply(p.source.read())) for p in way) for way in ways]
    except ValueError:
        # Nothing arrives at a part of it.
        return False
    first, *others = (array for one in whole for array in one.values())
    return all(same_bits(first, other) for other in others)


def restored_ties(pairs: list[Pair]) -> list[str]:
    """Targets that are one array again, which a file had to hold several times."""
    return [
        f"{' and '.join(p.target.path for p in group)} are one array in the target; "
        f"{' and '.join(p.source.path for p in group)}, separate in the source, hold the same values"
        for group in joined(pairs)
        if restored(group)
    ]


def joined(pairs: list[Pair]) -> list[list[Pair]]:
    """The pairs whose targets are one array, where their sources are several."""
    by_target: dict[Any, list[Pair]] = {}
    for p in pairs:
        by_target.setdefault(p.target.identity, []).append(p)
    return [group for group in by_target.values() if len({p.source.identity for p in group}) > 1]


def restored(group: list[Pair]) -> bool:
    """Whether names that share one array got their values from arrays that a file could not tie."""
    several = len({p.source.identity for p in group}) > 1
    return several and all(p.source.from_file for p in group) and same_values(group)


def same_values(group: list[Pair]) -> bool:
    """Whether the same bits arrive from every source."""
    if any(p.source.unreadable for p in group) or len({p.source.dtype for p in group}) > 1:
        return False
    first, *others = (p.layout.apply(p.source.read()) for p in group)
    return all(same_bits(first, other) for other in others)
