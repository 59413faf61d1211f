"""One leaf and its counterpart: by which layout the array travels, or why the two do not fit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from parity.weights.claims import Sides, reading, undecided
from parity.weights.layouts import AS_IS, TRANSPOSED, Bijection, Family
from parity.weights.leaf import Layer, Leaf
from parity.weights.named_layouts import Given, MisfitError, parse
from parity.weights.paths import Renamed
from parity.weights.rules import layout_by_name, row_of, rows_for
from parity.weights.unpaired import without_rule


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
