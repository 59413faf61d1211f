"""What the arrays of a file are called for which nobody gave names."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from parity.weights.claims import names_in
from parity.weights.cuts import cut_as_named
from parity.weights.files import FLAX_ONLY, Side, make_leaf
from parity.weights.layouts import AS_IS, TRANSPOSED, Flipped, Layout
from parity.weights.leaf import Leaf
from parity.weights.named_layouts import Given, MisfitError
from parity.weights.pairing import directed, sorted_out
from parity.weights.paths import Rename, Renamed, join, split
from parity.weights.rules import TORCH_NAMES, LeafRule, Rule, rows_for

# Layouts that give the shape on the other side without knowing it.
Permuted = Layout | Flipped


def side(room: Any) -> Side:
    return "torch" if room.NAME == "torch" else "flax"


def derived(
    sources: list[Leaf], from_side: Side, to_side: Side, rename: Any, ignore: Iterable[str]
) -> tuple[list[Leaf], dict[str, str]]:
    """The leaves of a file for which nobody gave names, and why others have no certain name there.

    Between files and models of one framework names stay. Across, the layer's row of the ledger
    decides; where no layer is known, only what its name alone makes certain is converted.
    """
    travelling, _, _ = sorted_out(sources, tuple(ignore))
    sides = (from_side, to_side)
    renames = directed(Rename(rename), sides, travelling)
    done = cut_as_named(travelling, [], renames, (lambda leaf: names_in(leaf, *sides), lambda leaf: ()))
    leaves, unnamed = list[Leaf](), dict[str, str]()
    for leaf in done.sources:
        leaves += counts(leaf, renames, leaves) if sides == ("flax", "torch") else []
        if from_side != to_side and any(one.torch == leaf.name for rule in rows_for(leaf.kinds) for one in rule.alone):
            # Of no counterpart by its nature: pairing tells of it, or refuses it.
            continue
        by = next((one for name in names_in(leaf, *sides) if (one := renames.find(name))), None)
        if by and (by.entry.layouts or by.entry.value.index):
            made_by = as_renamed(leaf, by, across=from_side != to_side)
            unnamed |= {leaf.path: made_by} if isinstance(made_by, str) else {}
            leaves += [made_by] if isinstance(made_by, Leaf) else []
            continue
        if from_side == to_side:
            found: tuple[str, Permuted, tuple[str, ...]] | str = (leaf.path, AS_IS, ())
        else:
            found = counterpart(leaf, to_side)
        if isinstance(found, str):
            unnamed[leaf.path] = found
            continue
        path, layout, kinds = found
        own = leaf.path if from_side == to_side else f"{join(leaf.owner, leaf.name)}{leaf.mark}"
        new, key = renames.apply(own)
        if key is not None:
            # Of a module only the path was renamed; the array's own name follows the ledger.
            path = new if split(new)[1] != leaf.name else join(split(new)[0], split(path)[1])
        # Two names of one array are one array in the file too, if it can say so.
        made = make_leaf(path, layout.shape(leaf.shape), leaf.dtype, leaf.identity, leaf.read)
        leaves.append(dataclasses.replace(made, kinds=kinds))
    return leaves, unnamed


def as_renamed(leaf: Leaf, by: Renamed, *, across: bool) -> Leaf | str:
    """An array as rename says, where it gives the layout, or why its shape is not certain."""
    if by.entry.value.index:
        return f"rename {by.entry} fills a part of an array, and nothing says how large that is"
    if across and len(leaf.shape) > 1 and not any(step.axes for step in by.entry.layouts):
        return f"rename {by.entry} does not say in which order the axes lie; add ' | transposed' or ' | as is' behind it"
    given = Given(by.entry.layouts)
    try:
        layout = (given if by.entry.forward else given.inverse()).built(leaf.shape, None)
    except MisfitError as error:
        return f"rename {by.entry}: {error}"
    return make_leaf(by.name, layout.shape(leaf.shape), leaf.dtype, leaf.identity, leaf.read)


def counts(leaf: Leaf, renames: Rename, known: list[Leaf]) -> list[Leaf]:
    """What only torch's layer has and what torch wants to find in a file, once for each layer: all 0."""
    kinds = leaf.kinds
    alone = {one.torch: (rule.torch, *one.new) for rule in rows_for(kinds) for one in rule.alone if one.new}
    found = []
    for name, (kind, dtype, shape) in alone.items():
        path = renames.apply(join(leaf.owner, name))[0]
        if all(path != other.path for other in known):
            made = make_leaf(path, shape, dtype, path, lambda shape=shape, dtype=dtype: np.zeros(shape, dtype))
            found.append(dataclasses.replace(made, kinds=(kind,)))
    return found


def counterpart(leaf: Leaf, to_side: Side) -> tuple[str, Permuted, tuple[str, ...]] | str:
    """The path and layout of an array on the other side and its layer's class there, or why they are not certain."""
    if leaf.claims:
        kind = leaf.claims[0].kinds[0]
        return f"{leaf.path} lies in a {kind}, whose arrays are cut or joined on the other side"
    rows = rows_for(leaf.kinds)
    found = [(rule, entry) for rule in rows for entry in rule.entries(leaf.name, "flax" if to_side == "torch" else "torch")]
    ways = {way[:2]: way for rule, entry in found if (way := certain(leaf, rule, entry, to_side))}
    if len(ways) == 1:
        return next(iter(ways.values()))
    if rows:
        return f"{leaf.path} belongs to a {leaf.kinds[0]}; what it is called on the other side, and its layout, is not certain"
    if leaf.kinds:
        if leaf.kinds[0].startswith(("torch.nn.", "flax.nnx.", "flax.linen.")):
            return f"{leaf.path} belongs to a {leaf.kinds[0]}, for which no rule is known"
        # A parameter of a module of the user's own keeps its name and layout.
        return join(leaf.owner, leaf.name), AS_IS, ()
    if to_side == "flax":
        return from_torch_by_name(leaf)
    if leaf.name == "kernel" and len(leaf.shape) == 2:
        return join(leaf.owner, "weight"), TRANSPOSED, ()
    if leaf.name in FLAX_ONLY and leaf.name != "kernel":
        return join(leaf.owner, TORCH_NAMES[leaf.name]), AS_IS, ()
    if len(leaf.shape) > 1 or leaf.name in ("mean", "var"):
        return f"{leaf.path} {leaf.shape}: its name alone does not tell what PyTorch calls it, or in which layout"
    return join(leaf.owner, leaf.name), AS_IS, ()


def certain(leaf: Leaf, rule: Rule, entry: LeafRule, to_side: Side) -> tuple[str, Permuted, tuple[str, ...]] | None:
    """What an entry of the ledger makes of an array, None if its shape on the other side is not told by its own."""
    # Heads have as many axes as the other layer wants; for one number there are two shapes.
    if not isinstance(entry.layout, Permuted) or "[" in entry.torch or "." in entry.flax:
        return None
    layout = entry.layout if to_side == "flax" else entry.layout.inverse()
    if layout.axes is not None and len(layout.axes) != len(leaf.shape):
        return None
    name, kind = (entry.flax, rule.flax) if to_side == "flax" else (entry.torch, rule.torch)
    return join(leaf.owner, name), layout, (kind,)


def from_torch_by_name(leaf: Leaf) -> tuple[str, Permuted, tuple[str, ...]] | str:
    """A name of PyTorch's in Flax's words.

    Only vectors called `bias` are certain. Any other name has several meanings: `weight` is a
    kernel, to be transposed, in a Linear, a table as it is in an Embedding, and stored as Flax has it
    already in GPT-2's Conv1D; nothing in a square matrix would ever show the mistake.
    """
    if leaf.name == "bias" and len(leaf.shape) == 1:
        return join(leaf.owner, "bias"), AS_IS, ()
    return f"{leaf.path} {leaf.shape}: its name alone does not tell what Flax calls it, or in which layout"
