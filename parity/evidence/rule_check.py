"""Is a row of the ledger right? There and back bit for bit, and the same function on an input."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from parity.errors import DivergenceError, InputError, TransferError, listed
from parity.evidence.compare import compare
from parity.evidence.numerics import same_bits
from parity.evidence.result import Report
from parity.evidence.subject import as_call, flax_room
from parity.frameworks import describe, load
from parity.weights.rules import row_of
from parity.weights.transfer import numpy_dtype, transfer


@dataclass(frozen=True)
class RuleCheck:
    """What a row of the ledger is worth for one pair of layers.

    Attributes:
        rule: the row, in words.
        arrays: how many travelled.
        problems: what did not come back as it was, or does not fit; one sentence each.
        report: of the comparison, if there was an input.
    """

    rule: str
    arrays: int
    problems: tuple[str, ...]
    report: Report | None

    @property
    def passed(self) -> bool:
        """Whether every bit came back and, if there was an input, the layers are the same function."""
        return not self.problems and (self.report is None or self.report.passed)

    def raise_for_divergence(self) -> None:
        """Raise if the row is wrong.

        Raises:
            DivergenceError: it did not pass.
        """
        if not self.passed:
            raise DivergenceError(str(self))

    def __str__(self) -> str:
        if self.problems:
            return listed(self.rule, self.problems)
        way = f"{self.rule}: {self.arrays} arrays there and back bit for bit"
        return way if self.report is None else f"{way}\n{self.report}"

    def to_dict(self) -> dict[str, Any]:
        """The result for machines."""
        from parity.report.data import document

        return document("rule check", self)


def check_rule(
    torch_layer: Any, flax_layer: Any, *args: Any, kwargs: Mapping[str, Any] | None = None, seed: int = 0
) -> RuleCheck:
    """Try the ledger's row for a pair of layers on random numbers; neither layer is changed.

    Args:
        torch_layer: a `torch.nn.Module` in eval mode.
        flax_layer: its counterpart in eval mode, set to compute the same; of Linen's a `parity.Linen`.
        args: inputs for both; without any, only the way there and back is tried.
        kwargs: keyword arguments for both.
        seed: of the random numbers.

    Returns:
        What was found; nothing is raised for a wrong row.

    Raises:
        InputError: the layers are no modules, or the ledger has no row for them.
        MissingFrameworkError: a framework is not installed.
    """
    rooms = load("torch"), flax_room(flax_layer)
    for room, layer in zip(rooms, (torch_layer, flax_layer)):
        if not room.is_model(layer):
            raise InputError(
                f"check_rule takes a torch.nn.Module and a flax.nnx.Module or a parity.Linen, got {describe(layer)}"
            )
    row = row_of(rooms[0].kinds(torch_layer), rooms[1].kinds(flax_layer))
    if row is None:
        raise InputError(
            f"no row for {rooms[0].kinds(torch_layer)[0]} and {rooms[1].kinds(flax_layer)[0]}; make one by parity.add_rule"
        )
    name = f"{row.torch} <-> {row.flax}"
    source, target, back = copy.deepcopy(torch_layer), copy.deepcopy(flax_layer), copy.deepcopy(torch_layer)
    target = rooms[1].with_call(target, as_call(source, args, kwargs or {}))
    randomise(rooms[0], source, seed)
    randomise(rooms[0], back, seed + 1)
    try:
        there = transfer(source, target)
        # A Linen model is not filled in place.
        target = there.value
        transfer(target, back)
    except TransferError as error:
        return RuleCheck(name, 0, error.problems, None)
    travelled = {entry.source.partition("[")[0] for entry in there.plan}
    problems = (*there.settings, *unequal(rooms[0], source, back, travelled))
    report = (
        compare(source, target, *args, kwargs=kwargs, levels=("weights", "identical", "gradients")) if args or kwargs else None
    )
    return RuleCheck(name, len(there.plan), problems, report)


def randomise(room: ModuleType, layer: Any, seed: int) -> None:
    """Random numbers above 0 in every floating point array: also a variance takes them."""
    rng = np.random.default_rng([seed, 6])
    leaves = [leaf for leaf in room.leaves(layer) if "float" in leaf.dtype]
    room.fill(layer, {leaf.path: rng.uniform(0.5, 1.5, leaf.shape).astype(numpy_dtype(leaf.dtype)) for leaf in leaves})


def unequal(room: ModuleType, source: Any, back: Any, travelled: set[str]) -> list[str]:
    """The arrays that did not come back bit for bit."""
    after = {leaf.path: leaf.read() for leaf in room.leaves(back)}
    wrong = {leaf.path: ~same_bits(leaf.read(), after[leaf.path]) for leaf in room.leaves(source) if leaf.path in travelled}
    return [f"{path} came back otherwise: {int(w.sum())} of {w.size} values" for path, w in wrong.items() if w.any()]
