"""The ledger for users: rows of their own, and what is in it."""

from typing import Any

from parity.errors import InputError, listed
from parity.report.data import document
from parity.weights.named_layouts import layout_names
from parity.weights.rules import RULES, Alone, LeafRule, Rule, Setting


def add_rule(torch: Any, flax: Any, *entries: LeafRule | Alone | Setting, note: str = "") -> Rule:
    """Add a pair of leaf layers to the ledger, for both directions of travel.

    The row holds for subclasses of both classes too, unless they have a nearer row. A module
    whose layers mirror each other by name needs none.

    Args:
        torch: the torch class, or its public name: `torch.nn.Linear`, otherwise module and name.
        flax: the Flax class, or its public name: `flax.nnx.Linear`, otherwise module and name.
        entries: arrays, arrays without counterpart, and settings that must agree, in any order.
        note: what equal arrays and settings do not make equal; told with every transfer.

    Returns:
        The row.

    Raises:
        InputError: the row exists, an entry is none of these, or two entries contradict each other.
    """
    row = Rule(
        public_name(torch),
        public_name(flax),
        tuple(entry for entry in entries if isinstance(entry, LeafRule)),
        tuple(entry for entry in entries if isinstance(entry, Setting)),
        tuple(entry for entry in entries if isinstance(entry, Alone)),
        note,
    )
    problems = [
        f"{entry!r} is no LeafRule, Alone, Agree, Require, Check or Remark"
        for entry in entries
        if not isinstance(entry, LeafRule | Alone | Setting)
    ]
    problems += contradictions(row)
    if any(known.torch == row.torch and row.flax in (known.flax, known.linen) for known in RULES):
        problems.append(f"there is a row for {row.torch} and {row.flax} already; derive a class of your own and name that")
    if problems:
        raise InputError(listed("add_rule", problems))
    RULES.append(row)
    return row


def rules() -> tuple[Rule, ...]:
    """Every row of the ledger, the package's own first."""
    return tuple(RULES)


def rules_document() -> dict[str, Any]:
    """The ledger for machines, with the layouts that a rename may name."""
    return document("rules", None, rules=[rule.to_dict() for rule in RULES], layouts=layout_names())


def public_name(layer: Any) -> str:
    """The name under which the ledger knows a class.

    Raises:
        InputError: it is neither a class nor a dotted name.
    """
    if isinstance(layer, str) and "." in layer:
        return layer
    if not isinstance(layer, type):
        raise InputError(f"a layer is named by its class or its dotted name, got {layer!r}")
    for inside, outside in (("torch.nn.modules", "torch.nn"), ("flax.nnx", "flax.nnx"), ("flax.linen", "flax.linen")):
        if layer.__module__.startswith(inside):
            return f"{outside}.{layer.__name__}"
    return f"{layer.__module__}.{layer.__qualname__}"


def contradictions(row: Rule) -> list[str]:
    """What cannot be meant: one array twice, or with a counterpart and without."""
    pairs = [(leaf.torch, leaf.flax, leaf.when) for leaf in row.leaves]
    found = [
        f"{torch} -> {flax} stands there twice"
        for torch, flax, when in dict.fromkeys(pairs)
        if pairs.count((torch, flax, when)) > 1
    ]
    names = {leaf.torch.partition("[")[0] for leaf in row.leaves}
    return found + [f"{alone.torch} has a counterpart and has none" for alone in row.alone if alone.torch in names]
