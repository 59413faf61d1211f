"""How faults are planted: the code of a port asks at each place whether the fault stands there.

The catalogue is what a clean port asks, so that no fault is listed that is not in the code.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import numpy as np
import torch
from flax import linen, nnx
from flax.core import unfreeze

import parity
from benchmarks.faults import mutants


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


@dataclass(eq=False)
class Plan:
    """Which fault a port is built with, if any; and which it could have been built with.

    Attributes:
        fault: the one that is planted.
        listing: whether it is made to learn what can be planted.
        asked: all that the code asked for, in order.
    """

    fault: Fault | None = None
    listing: bool = False
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

    # A Linen module is compiled once for all that equal it, and is given its plan anew in each call.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inside) and (self.whole, self.prefix) == (other.whole, other.prefix)

    def __hash__(self) -> int:
        return hash((self.whole, self.prefix))

    def __call__(self, place: str, kind: str) -> bool:
        """Ask for a place below the prefix."""
        return self.whole(".".join(part for part in (self.prefix, place) if part), kind)

    def under(self, prefix: str) -> Plan:
        """One module further down."""
        return Inside(self.whole, f"{self.prefix}.{prefix}")


# A change to a Flax model after its weights have arrived, planted if the plan says so; of a Linen model, to its variables.
Change = Callable[[Any, Plan], None]


@dataclass(frozen=True, eq=False)
class Model:
    """A pair of models, the Flax one with or without a fault.

    Attributes:
        name: of the pair.
        torch: makes the torch model.
        flax: makes the Flax model with the faults that a plan plants in its code.
        inputs: makes the arguments, from a generator.
        after: plants faults in the weights that have arrived.
        rename: as in `parity.transfer`.
        ready: changes the torch model before its weights are copied.
    """

    name: str
    torch: Callable[[], torch.nn.Module]
    flax: Callable[[Plan], Any]
    inputs: Callable[[np.random.Generator], tuple[Any, ...]]
    after: Change | None = None
    rename: dict[str, str] | None = None
    ready: Callable[[Any], None] | None = None

    def catalogue(self) -> list[Fault]:
        """Every fault that can be planted."""
        plan = Plan(listing=True)
        self.make(plan, 0)
        return list(plan.asked)

    def original(self, seed: int) -> torch.nn.Module:
        """The torch model. Every parameter is random: a bias of zeros or a scale of ones would hide faults."""
        torch.manual_seed(seed)
        model = self.torch().eval()
        randomise(model, seed)
        if self.ready:
            self.ready(model)
        return model

    def make(self, plan: Plan, seed: int) -> tuple[torch.nn.Module, Any]:
        """A pair with equal weights, but for the fault."""
        theirs = self.original(seed)
        mine = self.flax(plan)
        mine.eval()
        if not plan("", "weights not loaded"):
            parity.transfer(theirs, mine, rename=self.rename)
        if self.after:
            self.after(mine, plan)
        for mutant in mutants_of(self, seed) if self.mutated(plan) else ():
            if plan(mutant.place, mutant.kind):
                mutant.plant(mutants.module_at(mine, mutant.place))
        return theirs, mine

    def mutated(self, plan: Plan) -> bool:
        """Whether mutants are asked for: for the list of all faults, and for one of them."""
        return plan.listing or bool(plan.fault and plan.fault.kind.startswith(mutants.MUTATED))


@cache
def mutants_of(model: Model, seed: int) -> list[mutants.Mutant]:
    """Mutants of a pair's clean port, the same with the same seed."""
    theirs, mine = model.make(Plan(), seed)
    known = {path for path, _ in theirs.named_modules()}
    return mutants.drawn(mine, model.inputs(np.random.default_rng(seed)), known, seed)


class Port(parity.Linen):
    """A Linen port that is called like an NNX model."""

    def __call__(self, *args: Any) -> Any:
        """What the model returns."""
        return self.module.apply(self.variables, *args, rngs=self.rngs, **self.kwargs)


@dataclass(frozen=True, eq=False)
class LinenModel(Model):
    """A pair whose Flax side is a Linen module; `flax` makes the module, `after` gets its variables as nested dicts.

    Attributes:
        options: keyword arguments that the Flax side alone is given.
        streams: names of its random keys.
        without: torch's arrays for which the Flax module has none, by the kind of the fault that leaves them out.
    """

    options: dict[str, Any] = field(default_factory=dict)
    streams: tuple[str, ...] = ()
    without: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def make(self, plan: Plan, seed: int) -> tuple[torch.nn.Module, Any]:
        """A pair with equal weights, but for the fault."""
        theirs = self.original(seed)
        args = self.inputs(np.random.default_rng(seed))
        module: linen.Module = self.flax(plan)
        rngs = {name: jax.random.key(number) for number, name in enumerate(self.streams)}
        if plan("", "weights not loaded"):
            variables = module.init({"params": jax.random.key(0), **rngs}, *args, **self.options)
        else:
            empty = parity.Linen(module, None, *args, rngs=rngs, **self.options)
            missing = self.without.get(plan.fault.kind, ()) if plan.fault else ()
            variables = parity.transfer(theirs, empty, rename=self.rename, ignore=missing).value.variables
        variables = unfreeze(variables)
        if self.after:
            self.after(variables, plan)
        return theirs, Port(module, variables, *args, rngs=rngs, **self.options)


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


def without_second_biases(model: torch.nn.Module) -> None:
    """Recurrent layers as Flax's are: with one bias where the sum of two is all that counts."""
    with torch.no_grad():
        for name, array in model.named_parameters():
            if "bias_hh" in name:
                keep = array.shape[0] * 2 // 3 if "gru" in name else array.shape[0]
                array[:keep] = 0


def swap(first: nnx.Variable, second: nnx.Variable) -> None:
    """Exchange two arrays."""
    first[...], second[...] = second[...], first[...]
