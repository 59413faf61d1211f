"""Every leaf of the source looked up on the other side, by each of its names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from parity.weights.claims import Sides, known_names, names_in, torch_names
from parity.weights.leaf import Layer, Leaf
from parity.weights.pairs import Pair, make_pair
from parity.weights.paths import Rename, Renamed

# A name that a source leaf may have on the other side, or what rename made of it.
Try = tuple[str, Renamed | None]


@dataclass
class Met:
    """What became of the source's leaves, each looked up in the target by its names.

    Attributes:
        pairs: those that fit.
        problems: why others do not; one sentence each.
        taken: the source's leaf for each path of the target.
        stray: leaves that lead nowhere, or to several.
        used: keys of rename that were of use.
    """

    pairs: list[Pair] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    taken: dict[str, Leaf] = field(default_factory=dict)
    stray: list[tuple[Leaf, list[Leaf] | None]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)


def looked_up(sources: list[Leaf], targets: list[Leaf], renames: Rename, sides: Sides, flax_layers: Mapping[str, Layer]) -> Met:
    """Look every leaf of the source up in the target."""
    index, met = indexed(targets, sides), Met()
    for leaf in sources:
        tries = tried(leaf, renames, sides)
        if renamed := [(name, one) for name, one in tries if one]:
            met.used |= {one.entry.key.text for _, one in renamed}
            rivals = (renames.rivals(name) for name, _ in renamed)
            met.problems += [rival for rival in dict.fromkeys(rivals) if rival and rival not in met.problems]
        found, by = next(((index[new], one) for new, one in led(tries) if new in index), (None, None))
        if found is None or len(found) > 1:
            met.stray.append((leaf, found))
            continue
        path = found[0].path
        if path in met.taken:
            met.problems.append(f"{leaf.path} and {met.taken[path].path} both lead to {path}; rename one of them")
            continue
        met.taken[path] = leaf
        made = make_pair(leaf, found[0], sides, flax_layers, by)
        met.problems += [made] if isinstance(made, str) else []
        met.pairs += [made] if isinstance(made, Pair) else []
    return met


def tried(leaf: Leaf, renames: Rename, sides: Sides) -> list[Try]:
    """Every name of a source leaf, with what rename makes of it."""
    names = names_in(leaf, *sides)
    return [(name, renames.find(name)) for name in names] if renames.entries else [(name, None) for name in names]


def led(tries: list[Try]) -> list[Try]:
    """The names under which the counterpart is looked for: where the caller gave one, no derived one counts."""
    given: list[Try] = [(one.name, one) for _, one in tries if one]
    return given or tries


def indexed(leaves: list[Leaf], sides: Sides) -> dict[str, list[Leaf]]:
    """Leaves by every name that may be used for them; an exact name beats a derived one."""
    exact: dict[str, list[Leaf]] = {leaf.path: [leaf] for leaf in leaves}
    derived: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        for path in dict.fromkeys(known_names(leaf, sides[1], rows=sides[0] != sides[1])):
            if path not in exact and leaf not in derived.setdefault(path, []):
                derived[path].append(leaf)
    return derived | exact


def torch_name(leaf: Leaf, side: str) -> str:
    """What torch calls the array of a leaf, as far as its own layer tells."""
    return torch_names(leaf.kinds, leaf.name, side)[0]
