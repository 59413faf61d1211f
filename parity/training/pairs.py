"""Which parameter of an optimizer is which leaf of the Flax model."""

import fnmatch
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from parity import frameworks
from parity.errors import InputError, TransferError, listed
from parity.training.optimizers import KNOWN
from parity.weights.pairing import pair
from parity.weights.pairs import Pair


@dataclass(frozen=True)
class Matched:
    """The parameters of two models, from torch's side.

    Attributes:
        names: of torch's parameters, by `id`.
        pairs: for each name, the pairs of leaves in which its values lie; several if it is cut into blocks.
        others: paths of Flax leaves that are no parameter of torch's.
        firsts: every name of a parameter, tied ones too, and the first of them.
    """

    names: Mapping[int, str]
    pairs: Mapping[str, tuple[Pair, ...]]
    others: tuple[str, ...]
    firsts: Mapping[str, str]


def matched(optimizer: Any, torch_model: Any, flax_model: Any, rename: Any, ignore: Iterable[str]) -> Matched:
    """Pair the parameters of two models.

    Raises:
        InputError: the optimizer moves what is not in the torch model.
        TransferError: the models do not fit.
    """
    room = frameworks.load("torch.optimizers")
    names = room.names_of(optimizer, torch_model)
    pairing = pair(torch_model, flax_model, rename=rename, ignore=ignore, names=("torch model", "Flax model"))
    if pairing.problems or pairing.lost_ties:
        problems = (*pairing.problems, *pairing.lost_ties)
        raise TransferError(listed("the optimizer has no twin, for the models do not fit", problems), problems)
    firsts = room.all_names(torch_model)
    pairs: dict[str, tuple[Pair, ...]] = {}
    others = [*pairing.ignored, *(p.target.array_path for p in pairing.pairs if p.source.array_path not in firsts)]
    for p in pairing.pairs:
        if p.source.array_path in firsts:
            name = firsts[p.source.array_path]
            pairs[name] = (*pairs.get(name, ()), p)
    return Matched(names, pairs, tuple(others), firsts)


def homeless(found: Matched, groups: Iterable[tuple[str, ...]], still: Iterable[str]) -> list[str]:
    """Parameters that torch moves and Flax does not have; one sentence each."""
    return [
        f"{name} has no counterpart in the Flax model, but the optimizer moves it; call .requires_grad_(False) on it "
        "or leave it out of the optimizer"
        for names in groups
        for name in names
        if name not in found.pairs and name not in still
    ]


def chosen(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    """The names that patterns fit.

    Raises:
        InputError: a pattern fits none.
    """
    patterns, names = ((patterns,) if isinstance(patterns, str) else tuple(patterns)), tuple(names)
    idle = [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]
    if idle:
        raise InputError(f"unused: {', '.join(map(repr, idle))} fits no parameter of the optimizer")
    return {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}


def which(value: Any) -> str:
    """What a value is to the training functions: `optimizer` or `scheduler` of torch.

    Raises:
        InputError: neither.
    """
    for kind in ("optimizer", "scheduler"):
        if "torch" in sys.modules and frameworks.load(f"torch.{kind}s").owns(value):
            return kind
    raise InputError(
        f"to_optax takes an optimizer ({', '.join(KNOWN)} of torch.optim) or a scheduler of torch.optim.lr_scheduler, "
        f"got {frameworks.describe(value)}"
    )
