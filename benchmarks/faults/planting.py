"""How faults are planted: the code of a port asks at each place whether the fault stands there.

The catalogue is what a clean port asks, so that no fault is listed that is not in the code.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flax import nnx

import parity


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        place: dotted path of the torch module that computes something else than its twin; '' is the model itself,
            `a and b` are two modules that must both be named.
        kind: what is wrong, such as `epsilon`.
    """

    place: str
    kind: str

    @property
    def places(self) -> tuple[str, ...]:
        """The modules that must be named."""
        return tuple(self.place.split(" and "))

    def __str__(self) -> str:
        return f"{self.place or 'the model'}: {self.kind}"


@dataclass
class Plan:
    """Which fault a port is built with, if any; and which it could have been built with.

    Attributes:
        fault: the one that is planted.
        asked: all that the code asked for, in order.
    """

    fault: Fault | None = None
    asked: dict[Fault, None] = field(default_factory=dict)

    def __call__(self, place: str, kind: str) -> bool:
        """Whether the fault of this kind stands at this place."""
        self.asked[Fault(place, kind)] = None
        return self.fault == Fault(place, kind)

    def under(self, prefix: str) -> "Plan":
        """The same plan for a module inside, which knows its own places only."""
        return Inside(self, prefix)


class Inside(Plan):
    """A plan as a module inside sees it."""

    def __init__(self, whole: Plan, prefix: str):
        self.whole, self.prefix = whole, prefix

    def __call__(self, place: str, kind: str) -> bool:
        """Ask for a place below the prefix."""
        return self.whole(".".join(part for part in (self.prefix, place) if part), kind)

    def under(self, prefix: str) -> Plan:
        """One module further down."""
        return Inside(self.whole, f"{self.prefix}.{prefix}")


# A change to a Flax model after its weights have arrived, planted if the plan says so.
Change = Callable[[nnx.Module, Plan], None]


@dataclass(frozen=True)
class Model:
    """A pair of models, the Flax one with or without a fault.

    Attributes:
        name: of the pair.
        torch: makes the torch model.
        flax: makes the Flax model with the faults that a plan plants in its code.
        inputs: makes the arguments, from a generator.
        after: plants faults in the weights that have arrived.
        rename: as in `parity.transfer`.
    """

    name: str
    torch: Callable[[], torch.nn.Module]
    flax: Callable[[Plan], Any]
    inputs: Callable[[np.random.Generator], tuple[Any, ...]]
    after: Change | None = None
    rename: dict[str, str] | None = None

    def catalogue(self) -> list[Fault]:
        """Every fault that can be planted."""
        plan = Plan()
        self.make(plan, 0)
        return list(plan.asked)

    def make(self, plan: Plan, seed: int) -> tuple[torch.nn.Module, Any]:
        """A pair with equal weights, but for the fault.

        Every parameter is random: a bias of zeros or a scale of ones would hide faults.
        """
        torch.manual_seed(seed)
        theirs = self.torch().eval()
        randomise(theirs, seed)
        mine = self.flax(plan)
        mine.eval()
        if not plan("", "weights not loaded"):
            parity.transfer(theirs, mine, rename=self.rename)
        if self.after:
            self.after(mine, plan)
        return theirs, mine


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Biases, scales and running statistics away from the zeros and ones in which faults hide."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, array in [*model.named_parameters(), *model.named_buffers()]:
            if not array.is_floating_point():
                continue
            noise = torch.rand(array.shape, generator=made) - 0.5
            if name.endswith("running_var"):
                array.copy_(1.0 + noise)
            elif array.ndim < 2:
                array.add_(0.4 * noise)


def swap(first: nnx.Variable, second: nnx.Variable) -> None:
    """Exchange two arrays."""
    first[...], second[...] = second[...], first[...]
