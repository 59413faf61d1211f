"""The tables of a torch model that numbers are looked up in, and whether they are long enough."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parity.evidence.calls import Call
from parity.frameworks.torch.leaves import to_numpy
from parity.frameworks.torch.modes import Mode
from parity.frameworks.torch.running import evaluate, pinned

# Operations that take rows of their first argument, and where the numbers of the rows stand.
LOOKUPS = {"embedding": 1, "_embedding_bag": 1, "_embedding_bag_forward_only": 1, "index_select": 2}


@dataclass(frozen=True)
class Lookup:
    """One look-up.

    Attributes:
        table: name of the parameter, '' if it is computed.
        rows: how many there are.
        ids: the numbers that were looked up.
    """

    table: str
    rows: int
    ids: np.ndarray


class TooFewRowsError(Exception):
    """A look-up of a row that the table has not; raised before torch does it, which on a GPU ends the process."""


class Lookups(Mode):
    """Note every look-up, and stop at one that fails.

    Attributes:
        found: in the order in which they ran; the one that fails last.
    """

    def __init__(self, names: dict[int, str]):
        super().__init__()
        self.names = names
        self.found: list[Lookup] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at = LOOKUPS.get(func.overloadpacket.__name__)
        if at is not None and isinstance(args[0], Tensor):
            axis = args[1] if at == 2 else 0
            rows, ids = args[0].shape[axis], np.array(to_numpy(args[at]))
            table = self.names.get(id(args[0]), "").removeprefix("parameter ")
            self.found.append(Lookup(table, rows, ids))
            if ids.size and not 0 <= ids.min() <= ids.max() < rows:
                raise TooFewRowsError
        return func(*args, **(kwargs or {}))


def lookups(model: nn.Module, call: Call) -> tuple[list[Lookup], bool]:
    """Every look-up of a run, and whether the last one asks for a row that is not there.

    Raises:
        Exception: what the model raises for another reason.
    """
    watchers: list[Lookups] = []

    def watch(names: dict[int, str]) -> Lookups:
        watchers.append(Lookups(names))
        return watchers[0]

    with pinned(), torch.no_grad():
        try:
            evaluate(model, call, watch=watch)
        except TooFewRowsError:
            return watchers[0].found, True
    return watchers[0].found, False
