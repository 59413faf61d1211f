"""Which leaf belongs to which: every leaf on both sides accounted for, before anything is read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from parity.frameworks import owner_of
from parity.weights import collector
from parity.weights.agreement import setting_names, settings
from parity.weights.claims import Apart, Layers, Sides, asking, claimed, known_names, names_in, set_apart
from parity.weights.computed import as_wrapped, computed, normed
from parity.weights.cuts import Cut, cut_as_named, stack_hints
from parity.weights.files import Tree
from parity.weights.leaf import PASSING, Layer, Leaf
from parity.weights.lookup import Met, looked_up
from parity.weights.pairs import Pair
from parity.weights.paths import Rename, fits, in_order
from parity.weights.plan import Unpaired
from parity.weights.recurrence import single_layers, unrolled
from parity.weights.stray import by_torch_name, missing, remedy, together, unexpected, unfitting
from parity.weights.ties import conflicting_ties, follow_ties, restored_ties, ties
from parity.weights.unpaired import left_over, prefix_hint
from parity.weights.wrappers import Unwrapped, hint, unwrapped

# A module of parity.frameworks, or a checkpoint in its place.
Room = Any


@dataclass(frozen=True)
class Pairing:
    """All pairs of two models or trees, and all that stands in the way.

    Attributes:
        pairs: in the source's order.
        problems: leaves without counterpart, shapes that do not fit; one sentence each.
        ignored: paths left out because the caller said so.
        random: paths of random state, and of what runs leave behind, which never travel.
        ties: groups of names that are one array in the source.
        lost_ties: names that are one array on one side and several on the other; one sentence each.
        settings: settings that do not agree; one sentence each.
        renames: from names of the source to names of the target.
        alone: what has no counterpart by its nature, or is not the same although weights and
            settings are; one sentence each.
        aside: paths of torch arrays that are left out, or stay as they are, by their nature.
        zeros: leaves of the target that get zeros, because what they hold has no name in the source.
        notes: what was made of the names of a side; one sentence each.
        unpaired: leaves without counterpart; each is one of the problems too.
    """

    source: Room
    target: Room
    pairs: tuple[Pair, ...]
    problems: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    lost_ties: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    renames: Rename = field(default_factory=lambda: Rename(None))
    alone: tuple[str, ...] = ()
    zeros: tuple[Leaf, ...] = ()
    aside: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unpaired: tuple[Unpaired, ...] = ()


@collector.waiting()
def pair(
    source: Any,
    target: Any,
    *,
    rename: Any = None,
    ignore: Iterable[str] = (),
    names: tuple[str, str] = ("source", "target"),
) -> Pairing:
    """Pair the leaves of two models or trees of either framework.

    Args:
        source: a model or tree.
        target: a model or tree.
        rename: names on the torch side to names on the Flax side; either direction of travel.
            Between two of one framework, names of the source to names of the target.
        ignore: patterns (`*` stands for anything) of leaves on either side to leave out, and of settings
            that may disagree, after torch's path of their layer: `*.padding_idx`.
        names: what sentences call the two.

    Raises:
        InputError: source or target is nothing that has leaves.
    """
    both = opened(source, target, Rename(rename), ignore)
    sides, renames = both.sides, both.renames
    told = settings(both.layers, renames, sides).accepting(ignore)
    sought = (lambda leaf: names_in(leaf, *sides), lambda leaf: known_names(leaf, sides[1]))
    cut = cut_as_named(both.sources, both.targets, renames, sought)
    apart = set_apart(cut.sources, cut.targets, both.layers, renames, sides)
    met = looked_up(apart.sources, apart.targets, renames, sides, both.flax_layers)
    follow_ties(met.pairs, apart.targets, met.taken)
    left = left_behind(both, cut, apart, met)
    kept, lost = ties(met.pairs, both.whole.leaves[0], sides)
    by_leaf = [
        *unused_patterns(ignore, both.ignored + [name for one in told.accepted for name in setting_names(one)]),
        *met.problems,
        *(one.reason for one in left.unpaired),
        *unfitting([one.key for one in renames.entries if one.key.text not in met.used], apart.sources, sides),
        *conflicting_ties(met.pairs),
    ]
    # What explains many leaves at once stands before what is said of each.
    problems = [
        *cut.problems,
        *both.whole.problems,
        *(hint(apart.sources, apart.targets, sides) if by_leaf else []),
        *told.refused,
        *apart.problems,
        *left.help,
        *by_leaf,
    ]
    return Pairing(
        *both.rooms,
        pairs=tuple(met.pairs),
        problems=tuple(in_words(problem, names) for problem in problems),
        ignored=tuple(both.ignored),
        random=tuple(both.random),
        ties=kept,
        lost_ties=lost,
        settings=tuple(dict.fromkeys(told.disagreeing)),
        renames=renames.shortened(both.whole.shorter, both.whole.front),
        alone=tuple(both.whole.alone + apart.alone + left.alone + told.notes),
        zeros=tuple(apart.zeros),
        aside=tuple(both.whole.aside + apart.aside),
        notes=(*(in_words(note, names) for note in (*both.whole.notes, *restored_ties(met.pairs))), *told.left_out()),
        unpaired=tuple(replace(one, reason=in_words(one.reason, names)) for one in left.unpaired),
    )


@dataclass(frozen=True)
class Opened:
    """Both sides, ready for their leaves to be looked up.

    Attributes:
        rooms: what knows the leaves of the source, and of the target.
        sides: the framework of each.
        sources: the leaves that travel, in order, with the layers by whose rows they are known.
        targets: likewise.
        layers: of the source, and of the target.
        renames: from names of the source to names of the target.
        whole: what wrappers put in front of the names, and what is left of them.
        random: paths of random state, and of what runs leave behind.
        ignored: paths left out because the caller said so.
    """

    rooms: tuple[Room, Room]
    sides: Sides
    sources: list[Leaf]
    targets: list[Leaf]
    layers: Layers
    renames: Rename
    whole: Unwrapped
    random: list[str]
    ignored: list[str]

    @property
    def flax_layers(self) -> dict[str, Layer]:
        """Flax's layers by their paths; none between two of one framework, where no layout is asked for."""
        if self.sides[0] == self.sides[1]:
            return {}
        return {layer.own_path: layer for layer in self.layers[self.sides.index("flax")]}

    @property
    def unnamed(self) -> Mapping[str, str]:
        """Why leaves of the source have no name in the target, where that is known already."""
        return getattr(self.rooms[1], "unnamed", {})


def opened(source: Any, target: Any, rename: Rename, ignore: Iterable[str]) -> Opened:
    """Both sides with names that fit each other as far as layers and wrappers tell."""
    rooms = room_of(source, "source"), room_of(target, "target")
    sources, random_source, ignored_source = sorted_out(rooms[0].leaves(source), ignore)
    targets, random_target, ignored_target = sorted_out(rooms[1].leaves(target), ignore)
    sides: Sides = tuple("torch" if room.NAME == "torch" else "flax" for room in rooms)
    whole = unwrapped((ordered(sources), targets), (rooms[0].layers(source), rooms[1].layers(target)), rename)
    sources, targets = whole.leaves
    layers: Layers = whole.layers[0], whole.layers[1]
    if sides[0] != sides[1]:
        sources, targets = prepared(sources, layers[0], sides[0]), prepared(targets, layers[1], sides[1])
        layers = (single_layers(layers[0]), layers[1]) if sides[0] == "torch" else (layers[0], single_layers(layers[1]))
    renames = directed(rename, sides, sources)
    sources, targets, layers = with_norms(sources, targets, layers, renames, sides)
    random, ignored = random_source + random_target, ignored_source + ignored_target
    return Opened(rooms, sides, sources, targets, layers, renames, whole, random, ignored)


@dataclass(frozen=True)
class Left:
    """What is said of the leaves that found no counterpart.

    Attributes:
        unpaired: each of them, with its reason.
        help: what explains several at once or what to pass; one sentence each.
        alone: those that may be without a counterpart; one sentence each.
    """

    unpaired: list[Unpaired]
    help: list[str]
    alone: list[str]


def left_behind(both: Opened, cut: Cut, apart: Apart, met: Met) -> Left:
    """The leaves that nothing was found for, without those that another sentence has told already."""
    sides, unnamed = both.sides, both.unnamed
    # A further name of an array that has travelled needs no counterpart.
    travelled = {p.source.identity for p in met.pairs} | {p.source.part.identity for p in met.pairs if p.source.part}
    stray = [(leaf, found) for leaf, found in met.stray if found or leaf.identity not in travelled]
    empty = [leaf for leaf in apart.targets if leaf.path not in met.taken]
    # Of raw and averaged weights in one, half is left over in any case.
    told = {leaf.path for leaf in (*apart.sources, *apart.targets)} if both.whole.problems else cut.blamed
    stray = [(leaf, found) for leaf, found in stray if not {leaf.path, leaf.array_path} & told]
    empty = [leaf for leaf in empty if not {leaf.path, leaf.array_path} & told]
    left = left_over(stray, together(empty, apart.targets), both.layers, sides)
    strays = [leaf for leaf, found in left.stray if not found and leaf.path not in unnamed]
    lonely = by_torch_name(strays, sides[0]), by_torch_name(left.empty, sides[1])
    hints = stack_hints(*lonely, sides) or prefix_hint(*lonely, sides)
    unpaired = unexpected(left.stray, both.renames, apart.targets, sides, unnamed)
    unpaired += missing(left.empty, apart.sources, met.taken, sides)
    return Left(unpaired, left.why + (hints or remedy(strays, left.empty, sides, both.flax_layers)), left.alone)


def ordered(leaves: list[Leaf]) -> list[Leaf]:
    """Leaves with numbered siblings in the order of their numbers: files list them by letters."""
    places = {path: place for place, path in enumerate(in_order(leaf.path for leaf in leaves))}
    return sorted(leaves, key=lambda leaf: places[leaf.path])


def prepared(leaves: list[Leaf], layers: list[Layer], side: str) -> list[Leaf]:
    """The leaves of one side with the layers by whose rows they may be known to the other."""
    found = claimed(leaves, layers)
    return unrolled(found) if side == "torch" else found


def with_norms(
    sources: list[Leaf], targets: list[Leaf], layers: Layers, renames: Rename, sides: Sides
) -> tuple[list[Leaf], list[Leaf], Layers]:
    """Both sides, torch's `weight_norm` as the layer that `nnx.WeightNorm` is."""
    first = sides[0] == "torch"
    found = computed(sources if first else targets, (normed,)) if sides[0] != sides[1] else []
    if not found:
        return sources, targets, layers
    asked = asking(sources, targets, renames, sides)
    if first:
        sources, norms = as_wrapped(sources, found, layers[0], asked)
        return sources, targets, ([*layers[0], *norms], layers[1])
    targets, norms = as_wrapped(targets, found, layers[1], asked)
    return sources, targets, (layers[0], [*layers[1], *norms])


def room_of(value: Any, role: str) -> Room:
    """What knows the leaves of a model or tree: a framework's room, or the opened checkpoint itself."""
    return value if isinstance(value, Tree) else owner_of(value, role)


def sorted_out(leaves: list[Leaf], ignore: Iterable[str]) -> tuple[list[Leaf], list[str], list[str]]:
    """The leaves that travel, and the paths of random state (and what runs leave behind) and of what the caller ignores."""
    random = [leaf.path for leaf in leaves if leaf.role in PASSING]
    ignored = [leaf.path for leaf in leaves if any(fits(leaf.path, pattern) for pattern in ignore)]
    gone = set(random) | set(ignored)
    return [leaf for leaf in leaves if leaf.path not in gone], random, ignored


def unused_patterns(ignore: Iterable[str], ignored: list[str]) -> list[str]:
    return [
        f"ignore pattern {pattern!r} fits no leaf of either side and no setting that disagrees"
        for pattern in ignore
        if not any(fits(path, pattern) for path in ignored)
    ]


def directed(rename: Rename, sides: Sides, sources: list[Leaf]) -> Rename:
    """The rename from source names to target names: of the two directions the one whose keys fit the source."""
    if not rename.mapping:
        return rename
    given, turned = rename, rename.inverse()

    names = [name for leaf in sources for name in names_in(leaf, *sides)]

    def fitting(one: Rename) -> tuple[int, int]:
        # Where names alone leave it open, layouts tell which side is Flax's.
        marked = [sides[1] if entry.forward else sides[0] for entry in one.entries if entry.layouts]
        return len({key.text for name in names for key in one.keys.fitting(name)}), marked.count("flax")

    first, second = (turned, given) if sides == ("flax", "torch") else (given, turned)
    return first if fitting(first) >= fitting(second) else second


def in_words(sentence: str, names: tuple[str, str]) -> str:
    """A sentence about the two sides in the caller's words for them."""
    for role, name in zip(("source", "target"), names, strict=True):
        sentence = sentence.replace(f"the {role}", f"the {name}")
    return sentence
