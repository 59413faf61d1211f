"""By which names a leaf may be known on the other side, where the ledger says more than its own path does.

A row may name arrays of layers inside its layer (`query.kernel`), cut one torch array into
blocks for several of Flax (`in_proj_weight[q]`), and say that an array has no counterpart.
All of it is used only where the other side asks for it, so that a model of the user's own
that mirrors the names as they are is paired as it stands.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from parity.weights import rules
from parity.weights.leaf import Claim, Layer, Leaf
from parity.weights.paths import Rename, join, split
from parity.weights.rules import TORCH_NAMES, Alone, LeafRule, Rule, Side, entries_for, index, rows_for

Sides = tuple[Any, ...]
Layers = tuple[list[Layer], list[Layer]]


def claimed(leaves: list[Leaf], layers: list[Layer]) -> list[Leaf]:
    """The leaves, each with the layers further up whose rows name it."""
    ruled = {
        path: (layer, names)
        for layer in layers
        if (names := index().inner_names(layer.kinds))
        for path in (*layer.also, layer.path, layer.own_path)
    }
    claims = [tuple(claims_on(leaf, ruled)) for leaf in leaves] if ruled else [()] * len(leaves)
    return [replace(leaf, claims=found) if found else leaf for leaf, found in zip(leaves, claims, strict=True)]


def claims_on(leaf: Leaf, ruled: Mapping[str, tuple[Layer, set[str]]]) -> list[Claim]:
    found = []
    for path in dict.fromkeys((split(leaf.path)[0], leaf.owner, *leaf.also)):
        owner, name = path, leaf.name
        while owner:
            owner, last = split(owner)
            name = join(last, name)
            layer, names = ruled.get(owner, (None, set[str]()))
            if layer and name in names:
                found.append(Claim(layer.path, name, layer.kinds))
    return list(dict.fromkeys(found))


def torch_names(kinds: tuple[str, ...], name: str, side: str) -> list[str]:
    """What torch may call an array of a layer, likeliest first."""
    if side == "torch":
        return [name]
    known = [entry.torch for entry in entries_for(kinds, name, "flax")]
    return list(dict.fromkeys(known)) or [name if kinds else TORCH_NAMES.get(name, name)]


def owners(leaf: Leaf) -> list[str]:
    """The paths under which a leaf's layer may be known: torch's words, its own words, `layers` left out."""
    own = split(leaf.path)[0]
    if leaf.kinds and not leaf.also:
        return [own] if own == leaf.owner else [leaf.owner, own]
    found = [leaf.owner, own, *leaf.also]
    if not leaf.kinds:
        # In a tree nothing tells an nnx.Sequential from a list that is called layers: any of them may be one.
        parts = own.split(".")
        numbered = [i for i, part in enumerate(parts[:-1]) if part == "layers" and parts[i + 1].isdigit()]
        for count in range(1, len(numbered) + 1):
            for gone in itertools.combinations(numbered, count):
                found.append(".".join(part for i, part in enumerate(parts) if i not in gone))
        # Nor does anything tell a layer inside an nnx.WeightNorm.
        found.append(".".join(part for part in parts if part != "layer_instance"))
    return list(dict.fromkeys(found))


def other_names(leaf: Leaf, side: str) -> list[str]:
    """Further names of a leaf by the rows of its layer and of those further up: torch's for Flax, and Flax's for torch."""
    found = [join(claim.owner, claim.name) for claim in leaf.claims] if side == "torch" else []
    for owner, name, kinds in (*leaf.claims, (leaf.owner, leaf.name, leaf.kinds)):
        if side == "flax":
            found += [join(owner, one) for one in torch_names(kinds, name, side)] if kinds else []
        else:
            found += [join(owner, entry.flax) for entry in entries_for(kinds, name, "torch")]
    return found


def names_by_layer(leaf: Leaf, side: Side) -> list[str]:
    """All names of a leaf, likeliest first, where its own layer alone decides them; otherwise none. So it is with most."""
    owner, name = split(leaf.path)
    if not leaf.kinds or leaf.claims or leaf.mark or leaf.also or leaf.owner != owner or leaf.name != name:
        return []
    front = f"{owner}." if owner else ""
    return [f"{front}{one}" for one in index().names(leaf.kinds, name, side)]


def names_in(leaf: Leaf, side: Side, other: Side) -> list[str]:
    """The names by which a source leaf looks for its counterpart, likeliest first."""
    if side != other and (names := names_by_layer(leaf, side)):
        return names
    if leaf.mark:
        return [f"{name}{leaf.mark}" for name in names_in(unmarked(leaf), side, other)]
    names = [join(owner, name) for owner in owners(leaf) for name in torch_names(leaf.kinds, leaf.name, side)]
    # In a tree torch's name is a guess: it stands behind the leaf's own.
    own_first = side == other or not leaf.kinds
    found = [leaf.path, *names] if own_first else [*names, leaf.path]
    # A path may hold more than the layer's and the array's name: Linen's collection.
    found += [join(owner, leaf.name) for owner in owners(leaf)] if side == "flax" else []
    return list(dict.fromkeys(found + (other_names(leaf, side) if side != other else [])))


def unmarked(leaf: Leaf) -> Leaf:
    """A slice's leaf under the names of its array."""
    return replace(leaf, path=leaf.bare_path, mark="")


def reading(torch_leaf: Leaf, flax_leaf: Leaf, flax_layers: Mapping[str, Layer]) -> LeafRule | None:
    """The entry of the ledger for a pair of leaves, None if it has none."""
    return next(iter(readings(torch_leaf, flax_leaf, flax_layers)), None)


def undecided(torch_leaf: Leaf, flax_leaf: Leaf, flax_layers: Mapping[str, Layer]) -> str:
    """Why the layout of a pair of leaves is not certain, '' if it is: a setting decides, and no layer tells it."""
    found = [entry for entry in readings(torch_leaf, flax_leaf, flax_layers) if entry.when]
    if len({entry.layout for entry in found}) < 2:
        return ""
    ways = " or ".join(f"{entry.layout.name} ({entry.when[0]}={entry.when[1]})" for entry in found if entry.when)
    return (
        f"{torch_leaf.path} and {flax_leaf.path}: a setting of the Flax layer decides how the array is laid out, {ways}; "
        "give the Flax model in place of the tree or file"
    )


def readings(torch_leaf: Leaf, flax_leaf: Leaf, flax_layers: Mapping[str, Layer]) -> list[LeafRule]:
    """The entries of the ledger for a pair of leaves, as far as settings and shapes leave a choice."""
    found = [
        entry for entry in common(torch_leaf, flax_leaf) or lent(torch_leaf, flax_leaf) if holds(entry, flax_leaf, flax_layers)
    ]
    if len(found) < 2:
        return found
    # A class of Flax may stand for several of torch, as nnx.Conv does: the shapes tell which.
    fitting = [entry for entry in found if entry.layout.between(torch_leaf.shape, flax_leaf.shape)]
    return fitting or found


def common(torch_leaf: Leaf, flax_leaf: Leaf) -> list[LeafRule]:
    """The entries of rows that name both leaves."""
    if not torch_leaf.claims and not flax_leaf.claims:
        return index().shared_entries(torch_leaf.kinds, torch_leaf.name, flax_leaf.kinds, flax_leaf.name)
    return [
        entry
        for mine in views(torch_leaf)
        for theirs in views(flax_leaf)
        for entry in index().shared_entries(mine.kinds, mine.name, theirs.kinds, theirs.name)
    ]


def lent(torch_leaf: Leaf, flax_leaf: Leaf) -> list[LeafRule]:
    """The entries that the row of one side's layer lends, where the other is a tree or a layer of the user's own.

    A layer of the user's own that keeps the other framework's name keeps its layout too.
    """
    found: list[LeafRule] = []
    sides: tuple[tuple[Side, Leaf, Leaf], ...] = (("torch", torch_leaf, flax_leaf), ("flax", flax_leaf, torch_leaf))
    for side, leaf, other in sides:
        for view in views(leaf) if not rows_for(other.kinds) else ():
            found += entries_for(view.kinds, view.name, side)
    # A block is the business of its row alone.
    blocks = torch_leaf.name.partition("[")[1:]
    found = [entry for entry in found if split(entry.torch)[1].partition("[")[1:] == blocks]
    return [entry for entry in found if torch_leaf.name != flax_leaf.name or entry.torch == entry.flax]


def views(leaf: Leaf) -> list[Claim]:
    """A leaf as an array of each layer that claims it, and of its own: a layer further up knows more."""
    return [*leaf.claims, Claim(leaf.owner, leaf.name, leaf.kinds)]


def holds(entry: LeafRule, flax_leaf: Leaf, flax_layers: Mapping[str, Layer]) -> bool:
    """Whether the Flax layer has the setting on which an entry depends; where no layer is known, it is taken to."""
    if entry.when is None:
        return True
    name, value = entry.when
    layer = flax_layers.get(split(flax_leaf.path)[0])
    return layer is None or layer.settings(name) == value


@dataclass
class Apart:
    """Leaves in the form in which they travel.

    Attributes:
        sources: without those that travel nowhere; cut where the other side wants blocks.
        targets: likewise.
        alone: what has no counterpart by its nature; one sentence each.
        zeros: leaves of the target that get zeros.
        aside: paths of what was left out, or stays as it is.
        problems: what has no counterpart and may not be left out; one sentence each.
    """

    sources: list[Leaf]
    targets: list[Leaf]
    alone: list[str] = field(default_factory=list)
    zeros: list[Leaf] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)


def set_apart(sources: list[Leaf], targets: list[Leaf], layers: Layers, renames: Rename, sides: Sides) -> Apart:
    """Cut torch arrays into the blocks that Flax wants, and set aside what only one side has."""
    apart = Apart(sources, targets)
    if sides[0] == sides[1]:
        return apart
    asked = asking(sources, targets, renames, sides)
    if sides[0] == "torch":
        apart.sources = sorted_torch(sources, asked, apart, filled=False)
    else:
        apart.targets = sorted_torch(targets, asked, apart, filled=True)
    set_vacant(apart, layers[sides.index("torch")], renames, sides)
    return apart


def asking(sources: list[Leaf], targets: list[Leaf], renames: Rename, sides: Sides) -> Callable[[Leaf], bool]:
    """Whether Flax has a leaf for one of torch's."""

    # Most models hold nothing that asks.
    @functools.cache
    def known() -> set[str]:
        if sides[0] == "torch":
            return {name for leaf in targets for name in known_names(leaf, sides[1])}
        return {renames.apply(name)[0] for leaf in sources for name in names_in(leaf, *sides)}

    if sides[0] == "torch":
        return lambda leaf: any(renames.apply(name)[0] in known() for name in names_in(leaf, *sides))
    return lambda leaf: any(name in known() for name in known_names(leaf, "torch"))


def known_names(leaf: Leaf, side: Side, *, rows: bool = True) -> list[str]:
    """The names by which a target leaf may be found: its own first, then those by the rows of layers (`rows`)."""
    if rows and (names := names_by_layer(leaf, side)):
        return [leaf.path, *names]
    if leaf.mark:
        return [f"{name}{leaf.mark}" for name in known_names(unmarked(leaf), side, rows=rows)]
    names = [join(owner, name) for owner in owners(leaf) for name in (*torch_names(leaf.kinds, leaf.name, side), leaf.name)]
    return [leaf.path, *names, *(other_names(leaf, side) if rows else ())]


def sorted_torch(leaves: list[Leaf], asked: Callable[[Leaf], bool], apart: Apart, *, filled: bool) -> list[Leaf]:
    found: list[Leaf] = []
    for leaf in leaves:
        if leaf.kinds and not leaf.claims and not index().has_more(leaf.kinds):
            found.append(leaf)
            continue
        cut = () if leaf.mark else blocks_of(leaf, asked)
        lonely = alone_in(leaf)
        if cut:
            found += [block for block in cut if not left_alone(block, asked, apart, filled=filled)]
        elif lonely and not asked(leaf):
            set_aside(leaf, lonely, apart, filled=filled)
        else:
            found.append(leaf)
    return found


def left_alone(block: Leaf, asked: Callable[[Leaf], bool], apart: Apart, *, filled: bool) -> bool:
    """Whether a block has no counterpart by its nature; it is set aside then."""
    lonely = alone_in(block)
    if lonely is None or asked(block):
        return False
    set_aside(block, lonely, apart, filled=filled)
    return True


def blocks_of(leaf: Leaf, asked: Callable[[Leaf], bool]) -> tuple[Leaf, ...]:
    """The blocks of a leaf, if the other side asks for any of them."""
    ways = {names for view in views(leaf) for rule in rows_of(view) for whole, names in rule.blocks if whole == view.name}
    for names in ways if leaf.shape else ():
        if leaf.shape[0] % len(names) == 0:
            blocks = leaf.cut(names)
            if any(map(asked, blocks)):
                return blocks
    return ()


def alone_in(leaf: Leaf) -> Alone | None:
    """Why a leaf has no counterpart. In a tree a name says so only if it does in every row."""
    found = [alone for view in views(leaf) for rule in rows_of(view) for alone in rule.alone if alone.torch == view.name]
    if not leaf.kinds and any(rule.entries(view.name, "torch") for view in views(leaf) for rule in rows_of(view)):
        return None
    return found[0] if found else None


def rows_of(view: Claim) -> list[Rule]:
    """The rows of a view's layer; in a tree, where no layer is known, all of them."""
    return rows_for(view.kinds) if view.kinds else rules.RULES


def vacant(leaves: list[Leaf], torch_layers: list[Layer], renames: Rename, side: Side) -> list[tuple[Leaf, str]]:
    """The Flax leaves that are all 0 because torch's layer has no such array, each with the reason.

    Args:
        leaves: of the Flax side.
        torch_layers: of the torch side.
        renames: from names of the source to names of the target.
        side: which of the two the source is.
    """
    reasons: dict[str, str] = {}
    for layer in torch_layers:
        for rule in rows_for(layer.kinds):
            for entry in rule.leaves:
                if entry.zero_if and layer.settings(entry.zero_if[0]) == entry.zero_if[1]:
                    name, why = join(layer.path, entry.flax), f"{rule.torch} has {entry.zero_if[0]}={entry.zero_if[1]} here"
                    reasons[renames.apply(name)[0] if side == "torch" else name] = (
                        f"{why}, and {rule.flax} always has the array"
                    )
    found = []
    for leaf in leaves if reasons else ():
        names = [leaf.path, *(join(owner, leaf.name) for owner in owners(leaf))]
        names = names if side == "torch" else [renames.apply(name)[0] for name in names]
        reason = next((reasons[name] for name in names if name in reasons), "")
        found += [(leaf, reason)] if reason else []
    return found


def set_vacant(apart: Apart, torch_layers: list[Layer], renames: Rename, sides: Sides) -> None:
    """Fill, or leave out, the Flax arrays that torch's layers do without."""
    filled = sides[0] == "torch"
    found = vacant(apart.targets if filled else apart.sources, torch_layers, renames, sides[0])
    for leaf, reason in found:
        if not filled and holds_values(leaf):
            apart.problems.append(f"{leaf.path} has no counterpart and is not all 0: {reason}; make torch's with bias=True")
        else:
            apart.aside.append(leaf.path)
            apart.zeros += [leaf] if filled else []
            apart.alone.append(f"{leaf.path} is {'filled with zeros' if filled else 'all 0 and left out'}: {reason}")
    gone = {leaf.path for leaf, _ in found}
    apart.sources = apart.sources if filled else [leaf for leaf in apart.sources if leaf.path not in gone]
    apart.targets = [leaf for leaf in apart.targets if leaf.path not in gone] if filled else apart.targets


def set_aside(leaf: Leaf, alone: Alone, apart: Apart, *, filled: bool) -> None:
    """Tell of a leaf without counterpart, in the way that its row says."""
    if alone.fate == "refused" or (alone.fate == "zero" and not filled and holds_values(leaf)):
        apart.problems.append(f"{leaf.path} has no counterpart: {alone.because}")
    elif alone.fate == "zero" or (filled and leaf.new):
        apart.aside.append(leaf.path)
        apart.zeros += [leaf] if filled else []
        apart.alone.append(f"{leaf.path} {'is filled with zeros' if filled else 'is all 0 and left out'}: {alone.because}")
    else:
        apart.aside.append(leaf.path)
        apart.alone.append(f"{leaf.path} {'stays as it is' if filled else 'is left out'}: {alone.because}")


def holds_values(leaf: Leaf) -> bool:
    """Whether an array is anything but zeros; one that cannot be read is taken to be."""
    return bool(leaf.unreadable) or bool((leaf.read() != 0).any())
