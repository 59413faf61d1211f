"""Which module of one model stands for which of the other: by name, by the transfer's plan, by the order of calls."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from parity.evidence.calls import ModuleCall, same
from parity.evidence.shelf import taken
from parity.evidence.subject import Subject
from parity.weights.leaf import Layer
from parity.weights.paths import split, turn_of
from parity.weights.rules import row_of

DecidedBy = Literal["name", "plan", "call order"]


@dataclass(frozen=True)
class Partner:
    """The Flax module that stands for a torch module.

    Attributes:
        path: of the Flax module, in torch's words.
        decided_by: a name or a rename; the parameters that the transfer's plan pairs; or that both
            are the only ones left, in the order in which they are called.
    """

    path: str
    decided_by: DecidedBy


def partners(
    subject: Subject, torch_calls: list[ModuleCall], flax_calls: list[ModuleCall]
) -> tuple[dict[str, Partner], tuple[str, ...]]:
    """The partner of every torch module that is called, and what has none, with the reason.

    Returns:
        Partners by torch path, and one sentence for each module without one.
    """
    called = list(dict.fromkeys(c.path for c in torch_calls))
    torch_layers = {layer.path: layer for layer in subject.torch.layers(subject.torch_model)}
    # A function that a module holds has settings, and no call of its own.
    flax_layers = {
        layer.path: layer
        for layer in subject.flax.layers(subject.flax_model)
        if not "".join(layer.kinds[:1]).startswith("jax.")
    }
    renames = {path: subject.pairing.renames.apply(path) for path in called}
    # A module of several paths has the one under which it is seen called, whichever torch knows it by.
    seen = {c.path for c in flax_calls} & flax_layers.keys()
    ways: dict[str, list[str]] = {renamed: [renamed] for renamed, _ in renames.values()}
    for own, known in known_names(subject, ways).items():
        ways.get(known, []).append(own)
    found: dict[str, Partner] = {}
    for path, (renamed, key) in renames.items():
        partner = next((way for those in (seen, flax_layers) for way in ways[renamed] if way in those), None)
        if partner is not None:
            found[path] = Partner(partner, "name" if key is None else "plan")
    # What is seen called holds several layers as one, and is no stack of them.
    stacks = flax_layers.keys() - {c.path for c in flax_calls}
    in_stacks(subject, {path: renamed for path, (renamed, _) in renames.items() if path not in found}, found, stacks)
    by_plan(subject, called, found, flax_layers)
    by_order(torch_calls, flax_calls, torch_layers, flax_layers, found)
    taken = {partner.path for partner in found.values()}
    mine = looked_into(torch_calls, [path for path in called if path not in found])
    alone = [f"{path or 'the model'} (torch only)" for path in mine]
    # What a layer of the ledger is made of inside is that layer's own business.
    whole = tuple(f"{b.path}." for a, b in found.items() if a and ruled(torch_layers.get(a), flax_layers.get(b.path)))
    theirs = looked_into(flax_calls, [path for path in dict.fromkeys(c.path for c in flax_calls) if path not in taken])
    alone += [f"{path} (flax only)" for path in theirs if not path.startswith(whole or "\0")]
    return found, tuple(alone)


def in_stacks(subject: Subject, renamed: Mapping[str, str], found: dict[str, Partner], stacks: Collection[str]) -> None:
    """Add the turns of modules whose arrays the transfer's plan stacks: a scan over layers shows no call of theirs."""
    if not hasattr(subject.flax, "stacked") or "flax" in subject.recorded:
        return
    parts = [(pair.target.owner, pair.target.part) for pair in subject.pairing.pairs]
    known: dict[str, int] = {}
    for path, name in renamed.items():
        base, turn = turn_of(name)
        if turn is None or base not in stacks:
            continue
        if base not in known:
            inner = [part for owner, part in parts if inside(owner, base)]
            turns = {part.shape[0] if part and not part.before and part.spans[0].single else 0 for part in inner}
            [known[base]] = turns if len(turns) == 1 else {0}
        if known[base] and subject.flax.stacked(subject.flax_model, base, known[base]):
            found[path] = Partner(name, "plan")


def looked_into(calls: list[ModuleCall], paths: list[str]) -> list[str]:
    """Those of some modules that compute something in a call; in what hands on what it is given there is nothing to see."""
    wanted = set(paths)
    computing = {c.path for c in calls if c.path in wanted and not (c.args and same(taken(c.args[0]), taken(c.output)))}
    return [path for path in paths if path in computing]


def ruled(mine: Layer | None, theirs: Layer | None) -> bool:
    return mine is not None and theirs is not None and row_of(mine.kinds, theirs.kinds) is not None


def known_names(subject: Subject, wanted: Iterable[str]) -> dict[str, str]:
    """For a Flax module of several paths none of which is wanted by itself, the one that is."""
    paths, owners = set(wanted), dict[Any, list[str]]()
    for leaf in subject.flax.leaves(subject.flax_model):
        owners.setdefault(leaf.identity, []).append(leaf.owner)
    names = {
        path: next((p for p in group if p in paths), path) for group in owners.values() for path in group if path not in paths
    }
    for layer in subject.flax.layers(subject.flax_model):
        known = next((path for path in (layer.path, layer.own_path, *layer.also) if path in paths), None)
        names |= {layer.path: known} if known is not None and layer.path not in paths else {}
    return names


# What holds modules, and is none itself.
HOLDERS = tuple(f"flax.nnx.{name}" for name in ("List", "Dict"))


def by_plan(subject: Subject, called: list[str], found: dict[str, Partner], flax_layers: Mapping[str, Layer]) -> None:
    """Add the modules whose parameters are, by the transfer's plan, all those of one module of the other side."""
    # A projection that is cut into several has as many owners.
    owners = {(p.source.array_path, p.target.owner) for p in subject.pairing.pairs}
    taken = {partner.path for partner in found.values()}
    # From the inside: of two modules with the same parameters the inner one is the layer itself.
    for path in sorted((p for p in called if p not in found), key=lambda p: -p.count(".")):
        below = {(name, owner) for name, owner in owners if inside(name, path)}
        common = shared_start({owner for _, owner in below})
        # A port that unrolls a module into its parent has no module for it: the parent holds more than that.
        whole = all((name, owner) in below for name, owner in owners if inside(owner, common))
        if below and common and whole and common not in taken and not is_a(flax_layers.get(common), HOLDERS):
            found[path] = Partner(common, "plan")
            taken.add(common)


def inside(path: str, module: str) -> bool:
    return f"{path}.".startswith(f"{module}.")


def is_a(layer: Layer | None, kinds: tuple[str, ...]) -> bool:
    return layer is not None and any(kind in layer.kinds for kind in kinds)


def shared_start(paths: set[str]) -> str:
    """The deepest path under which all of them lie."""
    first, *others = [path.split(".") for path in paths] or [[]]
    length = 0
    while length < len(first) and all(other[: length + 1] == first[: length + 1] for other in others):
        length += 1
    return ".".join(first[:length])


def by_order(
    torch_calls: list[ModuleCall],
    flax_calls: list[ModuleCall],
    torch_layers: Mapping[str, Layer],
    flax_layers: Mapping[str, Layer],
    found: dict[str, Partner],
) -> None:
    """Add modules that are left over inside one pair, as many on both sides and alike one by one."""
    taken = {partner.path for partner in found.values()}
    for parent, partner in list(found.items()):
        mine = left_over(torch_calls, parent, set(found))
        theirs = left_over(flax_calls, partner.path, taken)
        alike = len(mine) == len(theirs) and all(
            kindred(torch_layers.get(a), flax_layers.get(b)) for a, b in zip(mine, theirs, strict=True)
        )
        for a, b in zip(mine, theirs, strict=True) if alike else ():
            found[a] = Partner(b, "call order")


def left_over(calls: list[ModuleCall], parent: str, paired: set[str]) -> list[str]:
    """The modules called by one module that have no partner yet, in the order of their first calls."""
    return list(dict.fromkeys(c.path for c in calls if c.inside and c.inside[0] == parent and c.path not in paired))


def kindred(mine: Layer | None, theirs: Layer | None) -> bool:
    """Whether two modules may stand for each other: a row of the ledger, or like names of classes."""
    if ruled(mine, theirs):
        return True
    if mine is None or theirs is None:
        return False
    a, b = (simple(kinds[0]) for kinds in (mine.kinds, theirs.kinds))
    return a in b or b in a


def simple(kind: str) -> str:
    name = split(kind)[1].lower()
    return name.removeprefix("torch").removeprefix("flax")
