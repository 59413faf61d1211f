"""What is said of leaves without counterpart, where more is known than that there is none."""

from collections.abc import Collection
from dataclasses import dataclass

from parity.weights.claims import Layers, Sides
from parity.weights.computed import explained
from parity.weights.leaf import Layer, Leaf
from parity.weights.mirrors import NO_COUNTERPART
from parity.weights.paths import join
from parity.weights.rules import rows_for

# What holds parameters or layers of the user's and computes nothing itself.
HOLDERS = tuple(
    f"torch.nn.{name}" for name in ("Module", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
)


@dataclass(frozen=True)
class LeftOver:
    """Leaves without counterpart.

    Attributes:
        stray: of the source, each with the leaves of the target that its name fits, if there are several.
        empty: of the target.
        why: what is known of some; those of torch's are no longer among the others. One sentence each.
        alone: what is told of those that may be without; one sentence each.
    """

    stray: list[tuple[Leaf, list[Leaf] | None]]
    empty: list[Leaf]
    why: list[str]
    alone: list[str]


def left_over(stray: list[tuple[Leaf, list[Leaf] | None]], empty: list[Leaf], layers: Layers, sides: Sides) -> LeftOver:
    """Leaves without counterpart, those that may be without and those of torch's for which a reason is known set apart."""
    alone = [left_alone(leaf) for leaf in (*(leaf for leaf, found in stray if not found), *empty) if constant(leaf)]
    stray = [(leaf, found) for leaf, found in stray if found or not constant(leaf)]
    empty = [leaf for leaf in empty if not constant(leaf)]
    if sides[0] == sides[1]:
        return LeftOver(stray, empty, [], alone)
    filled = sides[1] == "torch"
    torch_leaves, flax_leaves = (empty, [leaf for leaf, _ in stray]) if filled else ([leaf for leaf, _ in stray], empty)
    why, known = explained(torch_leaves, filled=filled)
    why += not_saved(flax_leaves, layers[sides.index("torch")])
    stray = [one for one in stray if one[0].path not in known]
    return LeftOver(stray, [leaf for leaf in empty if leaf.path not in known], why, alone)


def prefix_hint(strays: Collection[str], empties: Collection[str], sides: Sides) -> list[str]:
    """What to pass if names of one side are those of the other behind a prefix; both in torch's words."""
    for role, longer, shorter in (("source", strays, empties), ("target", empties, strays)):
        fronts = {name[: -len(other) - 1] for name in longer for other in shorter if name.endswith(f".{other}")}
        for front in sorted(fronts, key=len):
            fitting = sum(name.removeprefix(f"{front}.") in shorter for name in longer if name.startswith(f"{front}."))
            if fitting > 1 and 4 * fitting >= len(shorter):
                first = sides[0 if role == "source" else 1] == "torch" if sides[0] != sides[1] else role == "source"
                rename = {front: ""} if first else {"": front}
                return [f"{fitting} names of the {role} fit without {front!r} in front of them; pass rename={rename}"]
    return []


def constant(leaf: Leaf) -> bool:
    """Whether a leaf may be a constant that the model computed: no row of the ledger names it."""
    return leaf.loose and not leaf.claims


def bare_wrappers(flax_layers: list[Layer], paired: set[str]) -> list[str]:
    """Layers of Flax that are wrapped in `nnx.WeightNorm` where torch's have no `weight_norm`; one sentence each."""
    return [
        f"{layer.own_path or 'the model'} is an nnx.WeightNorm in Flax, {without_norm(layer)}"
        for layer in flax_layers
        if "flax.nnx.WeightNorm" in layer.kinds and layer.own_path not in paired
    ]


def without_norm(layer: Layer) -> str:
    """Why an `nnx.WeightNorm` is not what torch has, and what to do."""
    if layer.settings("use_scale") is False:
        return (
            "whose use_scale=False keeps no norm: the kernel would be normalised; set use_scale=True for what torch.nn.utils."
            "parametrizations.weight_norm does (and leave merge out), and take a layer without that out of the wrapper"
        )
    return (
        "and the torch layer keeps no norm of its own (torch.nn.utils.parametrizations.weight_norm): the kernel would be "
        "normalised; take the layer out of the wrapper, and where it was merged leave merge out"
    )


def not_saved(leaves: list[Leaf], torch_layers: list[Layer]) -> list[str]:
    """The buffers that torch has for leaves of Flax, and keeps out of its state_dict."""
    unsaved = {join(one.path, name) for one in torch_layers for name in one.settings("buffers that are not saved") or ()}
    return [
        f"{leaf.path}: torch has a buffer of that name that is not persistent, so that it never travels; register it with "
        f"persistent=True, or pass ignore={leaf.path!r} if Flax computes it itself"
        for leaf in leaves
        if join(leaf.owner, leaf.name) in unsaved
    ]


def left_alone(leaf: Leaf) -> str:
    """What is told of a plain array of a Flax module without counterpart."""
    return (
        f"{leaf.path} is an array in Flax but no nnx.Variable, and has no counterpart: it stays as it is; "
        "make it an nnx.Param or nnx.Variable if it is to travel"
    )


def without_rule(leaf: Leaf) -> str:
    """What to do about an array of a layer of torch's own for which the ledger has no row."""
    own = next((kind for kind in leaf.kinds if kind.startswith("torch.nn.") and kind.rpartition(".")[0] == "torch.nn"), "")
    if not own or own in HOLDERS or rows_for(leaf.kinds):
        return ""
    return f"; {NO_COUNTERPART.get(own, f'{own} has no rule yet, add one by parity.add_rule')}"
