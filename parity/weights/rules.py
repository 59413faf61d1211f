"""The ledger: which leaves a layer has in each framework, and which settings must agree.

One row serves both directions. A composite of mirrored names needs no row; a new leaf layer
is one row here and one row in its test.
"""

from dataclasses import dataclass
from typing import Any, Literal

from parity.weights.layouts import AS_IS, TRANSPOSED, Layout
from parity.weights.leaf import Layer


@dataclass(frozen=True)
class LeafRule:
    """One array of a layer: its name in torch, its name in Flax, and the layout between them."""

    torch: str
    flax: str
    layout: Layout = AS_IS


@dataclass(frozen=True)
class Agree:
    """A setting that must be equal on both sides, under its name in each."""

    torch: str
    flax: str


@dataclass(frozen=True)
class Require:
    """A setting of one side without which there is no counterpart on the other."""

    side: Literal["torch", "flax"]
    setting: str
    equals: Any
    because: str


@dataclass(frozen=True)
class Rule:
    """A pair of leaf layers.

    Attributes:
        torch: public name of the torch class; subclasses follow it.
        flax: public name of the Flax class; subclasses follow it.
        leaves: its arrays.
        settings: what must agree.
    """

    torch: str
    flax: str
    leaves: tuple[LeafRule, ...] = ()
    settings: tuple[Agree | Require, ...] = ()


RULES: list[Rule] = [
    Rule(
        "torch.nn.Linear",
        "flax.nnx.Linear",
        (LeafRule("weight", "kernel", TRANSPOSED), LeafRule("bias", "bias")),
    ),
    Rule(
        "torch.nn.LayerNorm",
        "flax.nnx.LayerNorm",
        (LeafRule("weight", "scale"), LeafRule("bias", "bias")),
        (
            Agree("eps", "epsilon"),
            Require("flax", "use_fast_variance", False, "E[x^2] - E[x]^2 loses digits on shifted rows; torch does not use it"),
        ),
    ),
    Rule(
        "torch.nn.Embedding",
        "flax.nnx.Embed",
        (LeafRule("weight", "embedding"),),
        (
            Require("torch", "padding_idx", None, "flax.nnx.Embed gives that row a gradient, torch gives it none"),
            Require("torch", "max_norm", None, "flax.nnx.Embed does not renormalise the rows that it looks up"),
            Require("torch", "scale_grad_by_freq", False, "flax.nnx.Embed does not scale gradients by frequency"),
        ),
    ),
    Rule(
        "torch.nn.Dropout",
        "flax.nnx.Dropout",
        (),
        (
            Agree("p", "rate"),
            Require("flax", "broadcast_dims", (), "torch draws a mask of its own for every element"),
        ),
    ),
]

# What a leaf of a tree, where no layer is known, is called in torch, by its name in Flax.
TORCH_NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


def rule_for(kinds: tuple[str, ...]) -> Rule | None:
    """The row of the nearest class along an MRO, torch's or Flax's; None if there is none."""
    for kind in kinds:
        for rule in RULES:
            if kind in (rule.torch, rule.flax):
                return rule
    return None


def leaf_rule(rule: Rule | None, name: str, side: Literal["torch", "flax"]) -> LeafRule | None:
    """The row's entry for an array, by its name on one side."""
    for leaf in rule.leaves if rule else ():
        if getattr(leaf, side) == name:
            return leaf
    return None


def layout_by_name(torch_name: str, flax_name: str, ndim: int) -> Layout:
    """The layout of a leaf of a tree, where only its names and rank are known."""
    return TRANSPOSED if (torch_name, flax_name, ndim) == ("weight", "kernel", 2) else AS_IS


def disagreements(torch_layer: Layer, flax_layer: Layer) -> list[str]:
    """The settings of a pair of layers that do not agree, one sentence each."""
    rule = rule_for(torch_layer.kinds)
    found = []
    for setting in rule.settings if rule and rule is rule_for(flax_layer.kinds) else ():
        if isinstance(setting, Agree):
            wanted, got = torch_layer.settings(setting.torch), flax_layer.settings(setting.flax)
            if wanted != got:
                found.append(
                    f"{setting.torch}={wanted!r} in torch, {setting.flax}={got!r} in Flax; set {setting.flax}={wanted!r}"
                )
        else:
            layer = torch_layer if setting.side == "torch" else flax_layer
            got = layer.settings(setting.setting)
            if got != setting.equals:
                where, fix = (
                    ("torch", "") if setting.side == "torch" else ("Flax", f"; set {setting.setting}={setting.equals!r}")
                )
                found.append(f"{setting.setting}={got!r} in {where}, wanted {setting.equals!r}: {setting.because}{fix}")
    # A composite's dtype, if it has one, says nothing of the layers in it.
    computes = flax_layer.settings("dtype") if rule else None
    holds = torch_layer.settings("parameter dtype")
    if computes is not None and holds is not None and computes != holds:
        found.append(f"dtype={computes} makes the Flax layer compute in {computes}, torch computes in {holds}; leave dtype out")
    return [f"{torch_layer.path or 'the model'}: {sentence}" for sentence in found]
