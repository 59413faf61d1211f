"""Which leaf belongs to which: every leaf on both sides accounted for, before anything is read."""

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from parity.frameworks import owner_of
from parity.weights.claims import Sides, claimed, names_in, other_names, owners, reading, set_apart, torch_names, undecided
from parity.weights.files import Tree
from parity.weights.layouts import AS_IS, Bijection
from parity.weights.leaf import Layer, Leaf
from parity.weights.paths import WRAPPERS, Names, Rename, join, natural, wrapper
from parity.weights.plan import Unpaired
from parity.weights.rules import disagreements, layout_by_name, refusals, row_of, rows_for

# A module of parity.frameworks, or a checkpoint in its place.
Room = Any
# Leaves of one side for which near names are looked for: a reader has no use for more.
SUGGESTED = 500


@dataclass(frozen=True)
class Pair:
    """One leaf of the source and its counterpart in the target.

    Attributes:
        source: the source's leaf.
        target: the target's leaf.
        layout: from the source's layout to the target's.
        decided_by: a rule of the ledger, or the names alone.
    """

    source: Leaf
    target: Leaf
    layout: Bijection
    decided_by: Literal["rule", "name"]


@dataclass(frozen=True)
class Pairing:
    """All pairs of two models or trees, and all that stands in the way.

    Attributes:
        pairs: in the source's order.
        problems: leaves without counterpart, shapes that do not fit; one sentence each.
        ignored: paths left out because the caller said so.
        random: paths of random state, which never travels.
        ties: groups of names that are one array in the source.
        lost_ties: names that are one array on one side and several on the other; one sentence each.
        settings: settings that do not agree; one sentence each.
        renames: from names of the source to names of the target.
        alone: what has no counterpart by its nature, or is not the same although weights and
            settings are; one sentence each.
        aside: paths of torch arrays that are left out, or stay as they are, by their nature.
        zeros: leaves of the target that get zeros, because what they hold has no name in the source.
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
    unpaired: tuple[Unpaired, ...] = ()


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
        ignore: patterns (`*` stands for anything) of leaves on either side to leave out.
        names: what sentences call the two.

    Raises:
        InputError: source or target is nothing that has leaves.
    """
    rooms = room_of(source, "source"), room_of(target, "target")
    sources, random_source, ignored_source = sorted_out(rooms[0].leaves(source), ignore)
    targets, random_target, ignored_target = sorted_out(rooms[1].leaves(target), ignore)
    sides: Sides = tuple("torch" if room.NAME == "torch" else "flax" for room in rooms)
    layers = rooms[0].layers(source), rooms[1].layers(target)
    if sides[0] != sides[1]:
        sources, targets = claimed(sources, layers[0]), claimed(targets, layers[1])
    renames, used = directed(Rename(rename), sides, sources), set[str]()
    problems = unused_patterns(ignore, ignored_source + ignored_target)
    apart = set_apart(sources, targets, renames, sides)
    sources, targets = apart.sources, apart.targets
    index = indexed(targets, sides)
    flax_layers = {layer.own_path: layer for layer in layers[sides.index("flax")]} if sides[0] != sides[1] else {}
    pairs: list[Pair] = []
    taken: dict[str, Leaf] = {}
    stray: list[tuple[Leaf, list[Leaf] | None]] = []
    for leaf in sources:
        tries = [renames.apply(name) for name in names_in(leaf, sides[0], sides[1])]
        used |= {key for _, key in tries if key is not None}
        # Where the caller gave a name, no derived one counts.
        tries = [(new, key) for new, key in tries if key is not None] or tries
        found = next((index[new] for new, _ in tries if new in index), None)
        if found is None or len(found) > 1:
            stray.append((leaf, found))
            continue
        if found[0].path in taken:
            problems.append(f"{leaf.path} and {taken[found[0].path].path} both lead to {found[0].path}; rename one of them")
            continue
        taken[found[0].path] = leaf
        made = make_pair(leaf, found[0], sides, flax_layers)
        problems += [made] if isinstance(made, str) else []
        pairs += [made] if isinstance(made, Pair) else []
    # A further name of an array that has travelled needs no counterpart.
    travelled = {p.source.identity for p in pairs}
    lonely = [(leaf, f) for leaf, f in stray if f or leaf.identity not in travelled]
    unnamed: Mapping[str, str] = getattr(rooms[1], "unnamed", {})
    unpaired = unexpected(lonely, renames, targets, sides, unnamed)
    follow_ties(pairs, targets, taken)
    empty = [leaf for leaf in targets if leaf.path not in taken]
    unpaired += missing(empty, sources, taken, sides)
    problems += [one.reason for one in unpaired]
    strays = [leaf for leaf, f in lonely if not f and leaf.path not in unnamed]
    help_first = remedy(strays, empty, sides, flax_layers)
    problems += [f"rename key {key!r} fits no name of the source" for key in renames.mapping if key not in used]
    kept, lost = ties(pairs, sources, sides)
    problems += conflicting_ties(pairs)
    told = settings(layers, renames, sides)
    problems = wrapped(sources, targets, problems, sides) + told.refused + apart.problems + help_first + problems
    return Pairing(
        rooms[0],
        rooms[1],
        tuple(pairs),
        tuple(in_words(problem, names) for problem in problems),
        tuple(ignored_source + ignored_target),
        tuple(random_source + random_target),
        kept,
        lost,
        tuple(told.disagreeing),
        renames,
        tuple(apart.alone + told.notes),
        tuple(apart.zeros),
        tuple(apart.aside),
        tuple(dataclasses.replace(one, reason=in_words(one.reason, names)) for one in unpaired),
    )


def room_of(value: Any, role: str) -> Room:
    """What knows the leaves of a model or tree: a framework's room, or the opened checkpoint itself."""
    return value if isinstance(value, Tree) else owner_of(value, role)


def sorted_out(leaves: list[Leaf], ignore: Iterable[str]) -> tuple[list[Leaf], list[str], list[str]]:
    """The leaves that travel, and the paths of random state and of what the caller ignores."""
    random = [leaf.path for leaf in leaves if leaf.role == "random state"]
    ignored = [leaf.path for leaf in leaves if any(fnmatch.fnmatchcase(leaf.path, pattern) for pattern in ignore)]
    gone = set(random) | set(ignored)
    return [leaf for leaf in leaves if leaf.path not in gone], random, ignored


def unused_patterns(ignore: Iterable[str], ignored: list[str]) -> list[str]:
    return [
        f"ignore pattern {pattern!r} fits no leaf of either side"
        for pattern in ignore
        if not any(fnmatch.fnmatchcase(path, pattern) for path in ignored)
    ]


def directed(rename: Rename, sides: Sides, sources: list[Leaf]) -> Rename:
    """The rename from source names to target names: of the two directions the one whose keys fit the source."""
    given, turned = rename, rename.inverse()

    def fitting(one: Rename) -> int:
        names = [name for leaf in sources for name in names_in(leaf, *sides)]
        return len({one.apply(name)[1] for name in names} - {None})

    first, second = (turned, given) if sides == ("flax", "torch") else (given, turned)
    return first if fitting(first) >= fitting(second) else second


def torch_name(leaf: Leaf, side: str) -> str:
    """What torch calls the array of a leaf, as far as its own layer tells."""
    return torch_names(leaf.kinds, leaf.name, side)[0]


def indexed(leaves: list[Leaf], sides: Sides) -> dict[str, list[Leaf]]:
    """Leaves by every name that may be used for them; an exact name beats a derived one."""
    exact: dict[str, list[Leaf]] = {leaf.path: [leaf] for leaf in leaves}
    derived: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        names = [
            join(owner, name) for owner in owners(leaf) for name in (*torch_names(leaf.kinds, leaf.name, sides[1]), leaf.name)
        ]
        names += other_names(leaf, sides[1]) if sides[0] != sides[1] else []
        for path in dict.fromkeys(names):
            if path not in exact and leaf not in derived.setdefault(path, []):
                derived[path].append(leaf)
    return derived | exact


def make_pair(source: Leaf, target: Leaf, sides: Sides, flax_layers: Mapping[str, Layer]) -> Pair | str:
    """The pair with its layout, or why the two do not fit."""
    if sides[0] == sides[1]:
        if source.shape != target.shape:
            return f"{source.path} has shape {source.shape}, {target.path} has {target.shape}"
        return Pair(source, target, AS_IS, "name")
    torch_leaf, flax_leaf = (source, target) if sides[0] == "torch" else (target, source)
    entry = reading(torch_leaf, flax_leaf, flax_layers)
    if not entry:
        stranger = strangers(torch_leaf, flax_leaf)
        if stranger:
            return stranger
    if entry and entry.when and (open_ := undecided(torch_leaf, flax_leaf, flax_layers)):
        return open_
    family = entry.layout if entry else AS_IS
    if not entry and not (torch_leaf.kinds and flax_leaf.kinds) and not rows_for(torch_leaf.kinds + flax_leaf.kinds):
        family = layout_by_name(torch_leaf.name, flax_leaf.name, len(flax_leaf.shape))
        if family is AS_IS and (torch_leaf.name, flax_leaf.name) == ("weight", "kernel") and len(flax_leaf.shape) > 1:
            # Of a filter and of attention heads alike, and nothing shows it where all axes are of one length.
            axes = len(flax_leaf.shape)
            return (
                f"{torch_leaf.path} and {flax_leaf.path}: their names alone do not tell how a kernel of {axes} axes "
                "is laid out; give a model in place of one of the trees or files"
            )
    layout = family.between(torch_leaf.shape, flax_leaf.shape)
    if layout is None:
        hint = ""
        if torch_leaf.shape == flax_leaf.shape:
            hint = f"; Flax stores it {family.name}"
        elif family is AS_IS and torch_leaf.shape == flax_leaf.shape[::-1] and len(flax_leaf.shape) > 1:
            hint = "; the shapes are each other's reverse, but no rule says that this array is transposed"
        return (
            f"{torch_leaf.path} has shape {torch_leaf.shape}, so {flax_leaf.path} must have {family.wanted(torch_leaf.shape)}, "
            f"but it has {flax_leaf.shape}{hint}"
        )
    return Pair(source, target, layout if sides[0] == "torch" else layout.inverse(), "rule" if entry else "name")


def strangers(torch_leaf: Leaf, flax_leaf: Leaf) -> str:
    """Why two leaves of one name are no pair: their layers have rows in the ledger, but none together."""
    mine, theirs = rows_for(torch_leaf.kinds), rows_for(flax_leaf.kinds)
    if not mine or not theirs or row_of(torch_leaf.kinds, flax_leaf.kinds):
        return ""
    wanted = " or ".join(dict.fromkeys(rule.flax for rule in mine))
    return (
        f"{torch_leaf.path} belongs to a {mine[0].torch} and {flax_leaf.path} to a {theirs[0].flax}; "
        f"the counterpart of {mine[0].torch} is {wanted}"
    )


def follow_ties(pairs: list[Pair], targets: list[Leaf], taken: dict[str, Leaf]) -> None:
    """Count further names of a target array that is already filled as filled."""
    filled = {p.target.identity: p.source for p in pairs}
    for leaf in targets:
        if leaf.path not in taken and leaf.identity in filled:
            taken[leaf.path] = filled[leaf.identity]


def unexpected(
    lonely: list[tuple[Leaf, list[Leaf] | None]],
    renames: Rename,
    targets: list[Leaf],
    sides: Sides,
    unnamed: Mapping[str, str],
) -> list[Unpaired]:
    """The leaves of the source that lead nowhere, or to several leaves; `unnamed` has reasons that are known already."""
    known = {join(other.owner, torch_name(other, sides[1])): other.path for other in targets}
    known = {other.path: other.path for other in targets} | known
    names, told = Names(known if lonely else ()), list[Unpaired]()
    for leaf, found in lonely:
        near: list[str] = []
        if found:
            near = [other.path for other in found]
            reason = f"{leaf.path} of the source fits several leaves of the target: {', '.join(near)}; say which with rename"
        elif leaf.path in unnamed:
            reason = unnamed[leaf.path]
        else:
            looked_for = renames.apply(names_in(leaf, sides[0], sides[1])[0])[0]
            near = [known[name] for name in names.nearest(looked_for)] if len(told) < SUGGESTED else []
            reason = f"{leaf.path} {leaf.shape} of the source has no counterpart in the target{suggestion(near)}"
        told.append(Unpaired("source", leaf.path, leaf.shape, leaf.dtype, reason, tuple(near)))
    return told


def missing(empty: list[Leaf], sources: list[Leaf], taken: dict[str, Leaf], sides: Sides) -> list[Unpaired]:
    """The leaves of the target that nothing arrives for."""
    used = {source.path for source in taken.values()}
    known = {join(s.owner, torch_name(s, sides[0])): s.path for s in sources if s.path not in used} if empty else {}
    names, told = Names(known), list[Unpaired]()
    for leaf in empty:
        looked_for = join(leaf.owner, torch_name(leaf, sides[1]))
        near = [known[name] for name in names.nearest(looked_for)] if len(told) < SUGGESTED else []
        reason = f"{leaf.path} {leaf.shape} of the target gets nothing from the source{suggestion(near)}"
        told.append(Unpaired("target", leaf.path, leaf.shape, leaf.dtype, reason, tuple(near)))
    return told


def remedy(stray: list[Leaf], empty: list[Leaf], sides: Sides, flax_layers: Mapping[str, Layer]) -> list[str]:
    """What to pass if leaves without counterpart belong together, or are to be left alone."""
    made = [make_pair(s, t, sides, flax_layers) for s, t in zip(stray, empty)]
    if len(stray) == len(empty) and all(isinstance(one, Pair) for one in made):
        rename: dict[str, str] = {}
        for s, t in zip(stray, empty, strict=True):
            mine, theirs = (s, t) if sides[0] == "torch" else (t, s)
            same_name = torch_name(s, sides[0]) == torch_name(t, sides[1])
            rename |= {mine.owner: theirs.owner} if same_name and mine.owner else {mine.path: theirs.path}
        return [f"if these are the same layers in the same order, pass rename={rename}"] if rename else []
    alone = [leaf.array_path for leaf in (stray or empty)[:2]] if not (stray and empty) else []
    return [f"to leave out what has no counterpart on purpose, pass ignore={tuple(alone)!r}"] if alone else []


def in_words(sentence: str, names: tuple[str, str]) -> str:
    """A sentence about the two sides in the caller's words for them."""
    for role, name in zip(("source", "target"), names, strict=True):
        sentence = sentence.replace(f"the {role}", f"the {name}")
    return sentence


def suggestion(near: list[str]) -> str:
    return f"; nearest name: {', '.join(near)}" if near else ""


def wrapped(sources: list[Leaf], targets: list[Leaf], problems: list[str], sides: Sides) -> list[str]:
    """What to do about names that differ because one of the models is wrapped."""
    source, target = [leaf.path for leaf in sources], [leaf.path for leaf in targets]
    found = []
    for role, paths, others in (("source", source, target), ("target", target, source)) if problems else ():
        prefix = wrapper(paths, others)
        if prefix:
            rename = {prefix: ""} if role == "source" or sides[0] != sides[1] else {"": prefix}
            found.append(
                f"every name of the {role} begins with {prefix!r}: {WRAPPERS[prefix]}; "
                f"give the model inside it, .{prefix}, or pass rename={rename}"
            )
        computed = [path for path in paths if ".parametrizations." in f".{path}"]
        if computed:
            found.append(
                f"{computed[0]} of the {role} is what a parametrization computes a parameter from; call "
                "torch.nn.utils.parametrize.remove_parametrizations on that layer first"
            )
    return found


def ties(pairs: list[Pair], sources: list[Leaf], sides: Sides) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The groups of source names that are one array, and the ties that only one side has."""
    lost = []
    for mine, theirs, where in (("source", "target", sides[1]), ("target", "source", sides[0])):
        by_identity: dict[Any, list[Pair]] = {}
        for p in pairs:
            by_identity.setdefault(getattr(p, mine).identity, []).append(p)
        for group in by_identity.values():
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
    """Targets that are one array although their sources are several."""
    by_target: dict[Any, list[Pair]] = {}
    for p in pairs:
        by_target.setdefault(p.target.identity, []).append(p)
    return [
        f"{' and '.join(p.source.path for p in group)} are separate arrays in the source, "
        f"but {' and '.join(p.target.path for p in group)} are one array in the target"
        for group in by_target.values()
        if len({p.source.identity for p in group}) > 1
    ]


@dataclass(frozen=True)
class Told:
    """What the settings of all pairs of layers come to, one sentence each."""

    disagreeing: list[str]
    refused: list[str]
    notes: list[str]


def settings(layers: tuple[list[Layer], list[Layer]], renames: Rename, sides: Sides) -> Told:
    """Disagreements of all layers that both sides have under one path."""
    told = Told([], [], [])
    if sides[0] == sides[1]:
        return told
    other = {layer.own_path: layer for layer in layers[1]} | {layer.path: layer for layer in layers[1]}
    for layer in layers[0]:
        names = [*(renames.apply(path)[0] for path in (layer.path, layer.own_path)), layer.path]
        twin = next((other[name] for name in names if name in other), None)
        if twin:
            mine, theirs = (layer, twin) if sides[0] == "torch" else (twin, layer)
            told.disagreeing.extend(disagreements(mine, theirs))
            told.refused.extend(refusals(mine, theirs))
            row = row_of(mine.kinds, theirs.kinds)
            told.notes.extend([f"{mine.path or 'the model'}: {row.note}"] if row and row.note else [])
    return told
