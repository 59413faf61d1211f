"""Which leaf belongs to which: every leaf on both sides accounted for, before anything is read."""

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from parity.frameworks import owner_of
from parity.said import Said
from parity.weights import collector
from parity.weights.claims import (
    Layers,
    Sides,
    asking,
    claimed,
    known_names,
    names_in,
    reading,
    set_apart,
    torch_names,
    undecided,
    unmarked,
)
from parity.weights.computed import as_wrapped, computed, normed
from parity.weights.cuts import cut_as_named, stack_hints
from parity.weights.files import Tree, same_bits
from parity.weights.layouts import AS_IS, TRANSPOSED, Bijection, Family
from parity.weights.leaf import PASSING, Layer, Leaf, gathered
from parity.weights.mirrors import mirror_problems
from parity.weights.named_layouts import Given, MisfitError, parse
from parity.weights.names import Name
from parity.weights.paths import Names, Rename, Renamed, bare, in_order, join, natural, nearest
from parity.weights.plan import Unpaired
from parity.weights.recurrence import single_layers, unrolled
from parity.weights.rules import disagreements, in_words_of, layout_by_name, refusals, remarks, row_of, rows_for
from parity.weights.unpaired import bare_wrappers, left_over, prefix_hint, without_rule
from parity.weights.wrappers import hint, unwrapped

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
        decided_by: a rule of the ledger, the names alone, or a layout that rename gave.
        given: the layouts that rename gave, as it writes them behind Flax's name; '' if it gave none.
        forward: whether those lead from source to target.
    """

    source: Leaf
    target: Leaf
    layout: Bijection
    decided_by: Literal["rule", "name", "rename"]
    given: str = ""
    forward: bool = True

    @property
    def names(self) -> tuple[str, str]:
        """Source and target name, with the layouts that rename gave, to be passed as a rename again."""
        if self.forward:
            return self.source.path, f"{self.target.path}{self.given}"
        return f"{self.source.path}{self.given}", self.target.path


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
    rooms = room_of(source, "source"), room_of(target, "target")
    sources, random_source, ignored_source = sorted_out(rooms[0].leaves(source), ignore)
    targets, random_target, ignored_target = sorted_out(rooms[1].leaves(target), ignore)
    sides: Sides = tuple("torch" if room.NAME == "torch" else "flax" for room in rooms)
    whole = unwrapped((ordered(sources), targets), (rooms[0].layers(source), rooms[1].layers(target)), Rename(rename))
    sources, targets = whole.leaves
    layers: Layers = whole.layers[0], whole.layers[1]
    if sides[0] != sides[1]:
        sources, targets = prepared(sources, layers[0], sides[0]), prepared(targets, layers[1], sides[1])
        layers = (single_layers(layers[0]), layers[1]) if sides[0] == "torch" else (layers[0], single_layers(layers[1]))
    renames = directed(Rename(rename), sides, sources)
    sources, targets, layers = with_norms(sources, targets, layers, renames, sides)
    told = settings(layers, renames, sides).accepting(ignore)
    problems = unused_patterns(ignore, ignored_source + ignored_target + [setting_path(one) for one in told.accepted])
    sought = (lambda leaf: names_in(leaf, *sides), lambda leaf: known_names(leaf, sides[1]))
    cut = cut_as_named(sources, targets, renames, sought)
    apart = set_apart(cut.sources, cut.targets, layers, renames, sides)
    sources, targets = apart.sources, apart.targets
    flax_layers = {layer.own_path: layer for layer in layers[sides.index("flax")]} if sides[0] != sides[1] else {}
    met = looked_up(sources, targets, renames, sides, flax_layers)
    pairs, taken, stray, used = met.pairs, met.taken, met.stray, met.used
    problems += met.problems
    # A further name of an array that has travelled needs no counterpart.
    travelled = {p.source.identity for p in pairs} | {p.source.part.identity for p in pairs if p.source.part}
    # Of raw and averaged weights in one, half is left over in any case.
    told_already = bool(whole.problems)
    stray = [(leaf, f) for leaf, f in stray if not told_already and not {leaf.path, leaf.array_path} & cut.blamed]
    stray = [(leaf, f) for leaf, f in stray if f or leaf.identity not in travelled]
    follow_ties(pairs, targets, taken)
    empty = [
        leaf
        for leaf in targets
        if leaf.path not in taken and not told_already and not {leaf.path, leaf.array_path} & cut.blamed
    ]
    left = left_over(stray, together(empty, targets), layers, sides)
    unnamed: Mapping[str, str] = getattr(rooms[1], "unnamed", {})
    unpaired = unexpected(left.stray, renames, targets, sides, unnamed) + missing(left.empty, sources, taken, sides)
    problems += [one.reason for one in unpaired]
    strays = [leaf for leaf, f in left.stray if not f and leaf.path not in unnamed]
    lonely = by_torch_name(strays, sides[0]), by_torch_name(left.empty, sides[1])
    hints = stack_hints(*lonely, sides) or prefix_hint(*lonely, sides)
    help_first = left.why + (hints or remedy(strays, left.empty, sides, flax_layers))
    problems += unfitting([one.key for one in renames.entries if one.key.text not in used], sources, sides)
    kept, lost = ties(pairs, whole.leaves[0], sides)
    problems += conflicting_ties(pairs)
    problems = (
        cut.problems
        + whole.problems
        + (hint(sources, targets, sides) if problems else [])
        + told.refused
        + apart.problems
        + help_first
        + problems
    )
    return Pairing(
        rooms[0],
        rooms[1],
        tuple(pairs),
        tuple(in_words(problem, names) for problem in problems),
        tuple(ignored_source + ignored_target),
        tuple(random_source + random_target),
        kept,
        lost,
        tuple(dict.fromkeys(told.disagreeing)),
        renames.shortened(whole.shorter),
        tuple(whole.alone + apart.alone + left.alone + told.notes),
        tuple(apart.zeros),
        tuple(whole.aside + apart.aside),
        (*(in_words(note, names) for note in (*whole.notes, *restored_ties(pairs))), *told.left_out()),
        tuple(replace(one, reason=in_words(one.reason, names)) for one in unpaired),
    )


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


def ordered(leaves: list[Leaf]) -> list[Leaf]:
    """Leaves with numbered siblings in the order of their numbers: files list them by letters."""
    places = {path: place for place, path in enumerate(in_order(leaf.path for leaf in leaves))}
    return sorted(leaves, key=lambda leaf: places[leaf.path])


# A name that a source leaf may have on the other side, or what rename made of it.
Try = tuple[str, Renamed | None]


def tried(leaf: Leaf, renames: Rename, sides: Sides) -> list[Try]:
    """Every name of a source leaf, with what rename makes of it."""
    names = names_in(leaf, *sides)
    return [(name, renames.find(name)) for name in names] if renames.entries else [(name, None) for name in names]


def led(tries: list[Try]) -> list[Try]:
    """The names under which the counterpart is looked for: where the caller gave one, no derived one counts."""
    given: list[Try] = [(one.name, one) for _, one in tries if one]
    return given or tries


def together(empty: list[Leaf], targets: list[Leaf]) -> list[Leaf]:
    """The leaves, an array in whose slices nothing arrives but once."""
    lacking = {leaf.path for leaf in empty}
    filled = {leaf.array_path for leaf in targets if leaf.mark and leaf.path not in lacking}
    found: dict[str, Leaf] = {}
    for leaf in empty:
        whole = leaf.mark and leaf.part and leaf.array_path not in filled
        found.setdefault(
            leaf.array_path if whole else leaf.path,
            replace(unmarked(leaf), shape=leaf.part.shape) if whole and leaf.part else leaf,
        )
    return list(found.values())


def unfitting(unused: list[Name], sources: list[Leaf], sides: Sides) -> list[str]:
    """The keys of rename that fit no name of the source, one sentence each; one that another outdoes fits nonetheless."""
    if not unused:
        return []
    known = {name: leaf.bare_path for leaf in sources for name in names_in(leaf, *sides)}
    lost = [key for key in unused if not any(map(key.matches, known))]
    whole = {bare(name): path for name, path in known.items()}
    return [
        f"rename key {key.text!r} fits no name of the source{suggestion([whole[name] for name in nearest(key.path, whole)])}"
        for key in lost
    ]


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


def fits(path: str, pattern: str) -> bool:
    """Whether a pattern of `ignore` means a path; one that is itself a path means that, whatever its brackets say."""
    return path == pattern or fnmatch.fnmatchcase(path, pattern)


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


def torch_name(leaf: Leaf, side: str) -> str:
    """What torch calls the array of a leaf, as far as its own layer tells."""
    return torch_names(leaf.kinds, leaf.name, side)[0]


def indexed(leaves: list[Leaf], sides: Sides) -> dict[str, list[Leaf]]:
    """Leaves by every name that may be used for them; an exact name beats a derived one."""
    exact: dict[str, list[Leaf]] = {leaf.path: [leaf] for leaf in leaves}
    derived: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        for path in dict.fromkeys(known_names(leaf, sides[1], rows=sides[0] != sides[1])):
            if path not in exact and leaf not in derived.setdefault(path, []):
                derived[path].append(leaf)
    return derived | exact


def make_pair(
    source: Leaf, target: Leaf, sides: Sides, flax_layers: Mapping[str, Layer], by: Renamed | None = None
) -> Pair | str:
    """The pair with its layout, or why the two do not fit."""
    if by and by.entry.layouts:
        return given_pair(source, target, sides, flax_layers, by)
    if sides[0] == sides[1]:
        if source.shape != target.shape:
            return f"{source.path} has shape {source.shape}, {target.path} has {target.shape}"
        return Pair(source, target, AS_IS, "name")
    torch_leaf, flax_leaf = (source, target) if sides[0] == "torch" else (target, source)
    found = family_of(torch_leaf, flax_leaf, flax_layers)
    if isinstance(found, str):
        return found
    family, decided_by = found
    layout = family.between(torch_leaf.shape, flax_leaf.shape)
    if layout is None:
        hint = ""
        if torch_leaf.shape == flax_leaf.shape:
            hint = f"; Flax stores it {family.name}"
        elif family is AS_IS and torch_leaf.shape == flax_leaf.shape[::-1] and len(flax_leaf.shape) > 1:
            hint = "; the shapes are each other's reverse, but no rule says that this array is transposed"
        if hint:
            way = f"{flax_leaf.path} | {other_way(family)}"
            hint += f": if this one is otherwise, rename to {way!r}, and square ones like it too, which fit both ways"
        for word in ("heads", "heads in"):
            if Given((parse(word),)).between(torch_leaf.shape, flax_leaf.shape):
                hint = f"; if these are heads, rename to {f'{flax_leaf.path} | {word}'!r}"
        return unequal(torch_leaf, flax_leaf, family, hint)
    if by and family is TRANSPOSED and layout is TRANSPOSED and columns_cut(torch_leaf) and len(set(flax_leaf.shape)) == 1:
        # A Linear is cut in its rows; of columns, what is stored as Flax has it is the likelier case, and is as square.
        return (
            f"{torch_leaf.path} is cut in columns and is square, so that nothing shows whether Flax wants it transposed; "
            f"rename to {f'{flax_leaf.path} | transposed'!r} or to {f'{flax_leaf.path} | as is'!r}"
        )
    return Pair(source, target, layout if sides[0] == "torch" else layout.inverse(), decided_by)


def other_way(family: Family) -> str:
    """The layout that is meant if not this one."""
    return "transposed" if family is AS_IS else "as is"


def columns_cut(leaf: Leaf) -> bool:
    """Whether a slice by rename takes all rows of a matrix and some of its columns."""
    if not leaf.mark or leaf.part is None or leaf.part.before or len(leaf.part.shape) != 2:
        return False
    rows, columns = (len(span.places) == size for span, size in zip(leaf.part.spans, leaf.part.shape, strict=True))
    return rows and not columns


def unequal(torch_leaf: Leaf, flax_leaf: Leaf, family: Family, hint: str) -> str:
    return (
        f"{torch_leaf.path} has shape {torch_leaf.shape}, so {flax_leaf.path} must have {family.wanted(torch_leaf.shape)}, "
        f"but it has {flax_leaf.shape}{hint}"
    )


def family_of(
    torch_leaf: Leaf, flax_leaf: Leaf, flax_layers: Mapping[str, Layer]
) -> tuple[Family, Literal["rule", "name"]] | str:
    """How an array is laid out by the ledger or by its names, and which of them says so; or why that is not certain."""
    entry = reading(torch_leaf, flax_leaf, flax_layers)
    stranger = "" if entry and rows_for(torch_leaf.kinds) else strangers(torch_leaf, flax_leaf)
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
    return family, "rule" if entry and not flax_leaf.by_name else "name"


def given_pair(source: Leaf, target: Leaf, sides: Sides, flax_layers: Mapping[str, Layer], by: Renamed) -> Pair | str:
    """The pair with the layout that rename gives, or why that does not fit."""
    entry = by.entry
    if by.tail:
        return f"rename {entry} gives a layout to a module, of which {source.path} is one array; give it to each array by name"
    marked = sides[1] if entry.forward else sides[0]
    if sides[0] != sides[1] and marked != "flax":
        return f"rename {entry} gives a layout to a name of torch's; write it behind Flax's name"
    before, behind = (source, target) if entry.forward else (target, source)
    last: Family | None = None
    if sides[0] != sides[1] and not any(step.axes for step in entry.layouts):
        found = family_of(before, behind, flax_layers)
        if isinstance(found, str):
            return found
        last = found[0]
    family = Given(entry.layouts, None if last is AS_IS else last)
    layout = family.between(before.shape, behind.shape)
    if layout is None:
        return f"rename {entry}: {misfit(family, before, behind)}"
    given = "".join(f" | {step.name}" for step in entry.layouts)
    return Pair(source, target, layout if entry.forward else layout.inverse(), "rename", given, entry.forward)


def misfit(family: Given, before: Leaf, behind: Leaf) -> str:
    """Why layouts that rename gives do not lead from one array to another."""
    try:
        made = family.built(before.shape, behind.shape)
    except MisfitError as error:
        return f"{before.path} {before.shape} to {behind.path} {behind.shape}: {error}"
    got = made.shape(before.shape)
    change = "take ' | transposed' away"
    if not any(step.word == "transposed" for step in family.steps):
        change = "add ' | transposed' behind it"
    hint = f"; {change}" if got == behind.shape[::-1] else ""
    return f"{before.path} {before.shape} becomes {got}, but {behind.path} has {behind.shape}{hint}"


def strangers(torch_leaf: Leaf, flax_leaf: Leaf) -> str:
    """Why two leaves of one name are no pair: their layers have rows in the ledger, but none together."""
    mine, theirs = rows_for(torch_leaf.kinds), rows_for(flax_leaf.kinds)
    if theirs and (rule := without_rule(torch_leaf)):
        return f"{torch_leaf.path} and {flax_leaf.path} of a {theirs[0].flax} are no pair{rule}"
    if not mine or not theirs or row_of(torch_leaf.kinds, flax_leaf.kinds):
        return ""
    wanted = " or ".join(dict.fromkeys(rule.flax for rule in mine))
    word = "transposed" if len(flax_leaf.shape) == 2 else "as is"
    return (
        f"{torch_leaf.path} belongs to a {mine[0].torch} and {flax_leaf.path} to a {theirs[0].flax}; "
        f"the counterpart of {mine[0].torch} is {wanted}; if these are one all the same, rename says how it is laid out: "
        f"{f'{flax_leaf.path} | {word}'!r}"
    )


def follow_ties(pairs: list[Pair], targets: list[Leaf], taken: dict[str, Leaf]) -> None:
    """Count further names of a target array that is already filled as filled."""
    filled = {p.target.identity: p.source for p in pairs}
    filled |= {p.target.part.identity: p.source for p in pairs if p.target.part}
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
    if not lonely:
        return []
    known = {join(other.owner, torch_name(other, sides[1])): other.path for other in targets}
    known = {other.path: other.path for other in targets} | known
    names, told = Names(known), list[Unpaired]()
    for leaf, found in lonely:
        near: list[str] = []
        if found:
            near = [other.path for other in found]
            reason = f"{leaf.path} of the source fits several leaves of the target: {', '.join(near)}; say which with rename"
        elif leaf.path in unnamed:
            reason = unnamed[leaf.path]
        else:
            looked_for = led(tried(leaf, renames, sides))[0][0]
            near = [known[name] for name in names.nearest(looked_for)] if len(told) < SUGGESTED else []
            rule = without_rule(leaf) if sides == ("torch", "flax") else ""
            reason = f"{leaf.path} {leaf.shape} of the source has no counterpart in the target{suggestion(near)}{rule}"
        told.append(Unpaired("source", leaf.path, leaf.shape, leaf.dtype, reason, tuple(near)))
    return told


def missing(empty: list[Leaf], sources: list[Leaf], taken: dict[str, Leaf], sides: Sides) -> list[Unpaired]:
    """The leaves of the target that nothing arrives for."""
    if not empty:
        return []
    used = {source.path for source in taken.values()}
    known = {join(s.owner, torch_name(s, sides[0])): s.path for s in sources if s.path not in used}
    names, told = Names(known), list[Unpaired]()
    for leaf in empty:
        looked_for = join(leaf.owner, torch_name(leaf, sides[1]))
        near = [known[name] for name in names.nearest(looked_for)] if len(told) < SUGGESTED else []
        rule = without_rule(leaf) if sides == ("flax", "torch") else ""
        reason = f"{leaf.path} {leaf.shape} of the target gets nothing from the source{suggestion(near)}{rule}"
        told.append(Unpaired("target", leaf.path, leaf.shape, leaf.dtype, reason, tuple(near)))
    return told


def remedy(stray: list[Leaf], empty: list[Leaf], sides: Sides, flax_layers: Mapping[str, Layer]) -> list[str]:
    """What to pass if leaves without counterpart belong together, or are to be left alone."""
    if any(leaf.mark for leaf in (*stray, *empty)):
        return []
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


def by_torch_name(leaves: list[Leaf], side: str) -> dict[str, Leaf]:
    return {join(leaf.owner, torch_name(leaf, side)): leaf for leaf in leaves if not leaf.mark}


def in_words(sentence: str, names: tuple[str, str]) -> str:
    """A sentence about the two sides in the caller's words for them."""
    for role, name in zip(("source", "target"), names, strict=True):
        sentence = sentence.replace(f"the {role}", f"the {name}")
    return sentence


def suggestion(near: list[str]) -> str:
    return f"; nearest name: {', '.join(near)}" if near else ""


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


@dataclass(frozen=True)
class Told:
    """What the settings of all pairs of layers come to, one sentence each."""

    disagreeing: list[str]
    refused: list[str]
    notes: list[str]
    accepted: list[str] = field(default_factory=list)

    def accepting(self, patterns: Iterable[str]) -> "Told":
        """The same, without the disagreements that the caller knows of."""
        known = [one for one in self.disagreeing if any(fits(setting_path(one), pattern) for pattern in patterns)]
        return replace(self, disagreeing=[one for one in self.disagreeing if one not in known], accepted=known)

    def left_out(self) -> list[str]:
        """What a reader must know of that."""
        told = "a setting is left out of the verdict, as asked"
        return [Said("setting-left-out", f"{told}: {sentence}") for sentence in dict.fromkeys(self.accepted)]


def setting_path(sentence: str) -> str:
    """The name by which `ignore` means a disagreement: torch's path of the layer, a dot, and the setting told first."""
    path, _, rest = sentence.partition(": ")
    name = rest.partition("=")[0].strip()
    return f"{path}.{name}" if name.isidentifier() else ""


def settings(layers: Layers, renames: Rename, sides: Sides) -> Told:
    """Disagreements of all layers that both sides have under one path."""
    told = Told([], [], [])
    if sides[0] == sides[1]:
        return told
    other, wrapped = dict[str, list[Layer]](), set[str]()
    # A layer that only its name tells has no settings.
    mine_known, theirs_known = ([layer for layer in one if not layer.by_name] for one in layers)
    exact = {path for layer in theirs_known for path in (layer.path, layer.own_path)}
    for layer in theirs_known:
        further = [path for path in layer.also if path not in exact]
        for path in dict.fromkeys((layer.path, layer.own_path, *further)):
            other.setdefault(path, []).append(layer)
    for layer in mine_known:
        paths = dict.fromkeys((layer.path, layer.own_path, *layer.also))
        names = [*(bare(renames.apply(path)[0]) for path in paths), layer.path, *layer.also]
        for twin in next((other[name] for name in names if name in other), []):
            mine, theirs = (layer, twin) if sides[0] == "torch" else (twin, layer)
            row = row_of(mine.kinds, theirs.kinds)
            wrong = [*disagreements(row, mine, theirs), *([] if row else mirror_problems(mine, theirs))]
            told.disagreeing.extend(in_words_of(theirs, sentence) for sentence in wrong)
            told.refused.extend(in_words_of(theirs, sentence) for sentence in refusals(row, mine, theirs))
            told.notes.extend(in_words_of(theirs, sentence) for sentence in remarks(row, mine, theirs))
            wrapped |= {theirs.own_path} if row else set()
    told.refused.extend(bare_wrappers(layers[sides.index("flax")], wrapped))
    return told
