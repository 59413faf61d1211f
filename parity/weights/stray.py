"""What is said of leaves for which nothing was found: the nearest names, and what to pass."""

from collections.abc import Mapping
from dataclasses import replace

from parity.weights.claims import Sides, names_in, unmarked
from parity.weights.leaf import Layer, Leaf
from parity.weights.lookup import led, torch_name, tried
from parity.weights.names import Name
from parity.weights.pairs import Pair, make_pair
from parity.weights.paths import Names, Rename, bare, join, nearest
from parity.weights.plan import Unpaired
from parity.weights.unpaired import without_rule

# Leaves of one side for which near names are looked for: a reader has no use for more.
SUGGESTED = 500


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


def suggestion(near: list[str]) -> str:
    return f"; nearest name: {', '.join(near)}" if near else ""


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
