"""Optimizer state from torch to optax and back, so that a run goes on in the other framework."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity import frameworks
from parity.errors import InputError, TransferError, listed
from parity.training.optimizers import SCALARS, TENSORS, Optimizer
from parity.training.pairs import Matched, matched
from parity.weights.leaf import Leaf, gathered
from parity.weights.pairs import Pair

Tensors = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class OptimizerTransfer:
    """What travelled.

    Attributes:
        value: the filled optimizer, or the new state.
        arrays: torch's name of a parameter and of each array that travelled for it.
        steps: updates so far, by parameter group; None where nothing counts them.
    """

    value: Any
    arrays: tuple[tuple[str, str], ...]
    steps: tuple[int | None, ...]

    def __str__(self) -> str:
        names = sorted({name for _, name in self.arrays})
        steps = ", ".join("uncounted" if step is None else f"{step:,}" for step in self.steps)
        return f"{len(self.arrays)} arrays ({', '.join(names) or 'none'}), updates so far by group: {steps}"

    def to_dict(self) -> dict[str, Any]:
        """The result for machines; the value itself is left out."""
        from parity.report.data import document

        return document("optimizer transfer", self, ("value",))


def transfer_optimizer(
    source: Any,
    target: Any,
    torch_model: Any,
    flax_model: Any,
    *,
    scheduler: Any = None,
    every: int = 1,
    step: int | None = None,
    rename: Mapping[str, str] | None = None,
    ignore: Iterable[str] = (),
) -> OptimizerTransfer:
    """Carry moments, buffers and step counts from an optimizer to its twin, bit for bit.

    The arrays take on the layout of the parameter that they belong to. Parameters themselves travel
    by `parity.transfer`. A run that goes on in the other framework takes the steps that it would have
    taken in its own. A group that was added later and has taken no step yet begins as `init` lets it.

    Args:
        source: a torch optimizer, or the state of its twin (made by `init` or `update` of what
            `parity.to_optax` returned for the same models; also inside a chain), or an `nnx.Optimizer`. Never changed.
        target: the other of the two. An optimizer is filled in place; of a state a new one comes back.
        torch_model: the model that the torch optimizer moves.
        flax_model: its twin.
        scheduler: of the torch optimizer. On the way to optax it tells how many updates there were; on the way
            to torch it takes as many steps as there were.
        every: updates to each step of the scheduler.
        step: updates so far, where neither side counts them: SGD, and RMSprop and Adadelta on the way to torch.
        rename: as in `parity.transfer`.
        ignore: as in `parity.transfer`.

    Returns:
        What travelled, with the filled optimizer or the new state.

    Raises:
        InputError: the two are no optimizer and a state.
        TransferError: the state does not fit; all problems at once, nothing was written.
    """
    room, other = frameworks.load("torch.optimizers"), frameworks.load("optax")
    if room.owns(source) == room.owns(target):
        raise InputError(
            "one of source and target must be a torch optimizer, the other the state of its twin, got "
            f"{frameworks.describe(source)} and {frameworks.describe(target)}"
        )
    optimizer, state = (source, target) if room.owns(source) else (target, source)
    if not other.owns(state):
        raise InputError(
            f"no state of a twin in {frameworks.describe(state)}; make the transformation by parity.to_optax(optimizer, ...), "
            "and its state by init(parameters) or nnx.Optimizer"
        )
    found = matched(optimizer, torch_model, flax_model, rename, ignore)
    told = Told(room.read(optimizer, found.names), found, scheduler, every, step)
    return told.to_optax(optimizer, state) if optimizer is source else told.to_torch(state, optimizer)


@dataclass(frozen=True)
class Told:
    """What a call has to go by."""

    optimizer: Optimizer
    found: Matched
    scheduler: Any
    every: int
    step: int | None

    @property
    def scheduled(self) -> int | None:
        """Steps of the scheduler, None without one."""
        return None if self.scheduler is None else frameworks.load("torch.schedulers").position(self.scheduler)

    def to_optax(self, source: Any, target: Any) -> OptimizerTransfer:
        """Torch's state in the twin's."""
        room = frameworks.load("optax")
        mine, there = frameworks.load("torch.optimizers").read_state(source, self.found.names), room.read_state(target)
        if there.tensors and not mine:
            problem = "the optimizer has taken no step; what `init` gives is its state"
            raise TransferError(f"optimizer state refused, nothing was written: {problem}", (problem,))
        problems: list[str] = []
        tensors, arrays = self.spread(mine, there.tensors, problems)
        scalars: dict[int, dict[str, float]] = {}
        counts: dict[int, int] = {}
        for number, group in enumerate(self.optimizer.groups):
            moving = [name for name in group.names if self.moves(name, number, there, mine)]
            steps = {name: int(mine[name]["step"]) for name in moving if "step" in mine.get(name, {})}
            step = 0 if number in self.added(mine) else self.agreed(number, steps, problems)
            if number in there.counts:
                counts[number] = step if step is not None else self.asked(number, problems)
            scalars[number] = {
                entry: value
                for entry in SCALARS.get(self.optimizer.kind, ())
                if (value := only({float(mine[n][entry]) for n in moving if entry in mine.get(n, {})})) is not None
            }
        if problems:
            raise TransferError(listed("optimizer state refused, nothing was written", problems), problems)
        value = room.write_state(target, type(there)(tensors, scalars, counts))
        return OptimizerTransfer(value, arrays, tuple(counts.get(i) for i in range(len(self.optimizer.groups))))

    def moves(self, name: str, number: int, there: Any, mine: Mapping[str, Any]) -> bool:
        return name in mine or any(path_in(p, there.tensors) for p in self.found.pairs.get(name, ()))

    def added(self, mine: Mapping[str, Any]) -> set[int]:
        """Groups that have taken no step while others have: added later. What `init` gives is their state.

        Not where there is a scheduler, which optax would count from their beginning too.
        """
        fresh = {n for n, group in enumerate(self.optimizer.groups) if not any(name in mine for name in group.names)}
        return fresh if self.scheduler is None and len(fresh) < len(self.optimizer.groups) else set()

    def spread(
        self, mine: Mapping[str, Mapping[str, Any]], there: Tensors, problems: list[str]
    ) -> tuple[Tensors, tuple[tuple[str, str], ...]]:
        """Torch's arrays in the layout of the Flax leaves, by their paths."""
        added = {name for number in self.added(mine) for name in self.optimizer.groups[number].names}
        parts: dict[str, list[tuple[Leaf, np.ndarray]]] = {}
        arrays, known = [], dict[str, str]()
        for name in (name for group in self.optimizer.groups for name in group.names):
            have = {entry: a for entry, a in mine.get(name, {}).items() if entry in TENSORS[self.optimizer.kind]}
            places = [(p, path) for p in self.found.pairs.get(name, ()) if (path := path_in(p, there))]
            want = set().union(*(there[path] for _, path in places))
            if name in added:
                continue
            if set(have) != want:
                problems.append(unlike(name, set(have), want))
                continue
            for p, path in places:
                for entry, array in have.items():
                    parts.setdefault(entry, []).append((p.target, p.layout.apply(p.source.of(array))))
                    known[p.target.array_path] = path
                    if array.dtype != there[path][entry].dtype:
                        problems.append(widths(name, entry, array, there[path][entry]))
            arrays += [(name, entry) for entry in have]
        tensors: Tensors = {}
        # Of stacked layers every one has to be there.
        for entry, found in parts.items() if not problems else ():
            for path, array in gathered(found).items():
                tensors.setdefault(known[path], {})[entry] = array
        return tensors, tuple(arrays)

    def agreed(self, number: int, steps: Mapping[str, int], problems: list[str]) -> int | None:
        """The one number of updates of a group, None if torch does not count them."""
        if len(set(steps.values())) > 1:
            low, high = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
            problems.append(
                f"in group {number} {low} has taken {steps[low]} steps and {high} {steps[high]}; optax counts once for a "
                "group: put them into groups of their own"
            )
            return None
        step = only(set(steps.values()))
        step = self.step if step is None else step
        by_scheduler = None if self.scheduled is None else self.scheduled * self.every
        if step is not None and by_scheduler is not None and step // self.every != self.scheduled:
            problems.append(
                f"group {number} has taken {step} steps and the scheduler {self.scheduled}, of {self.every} updates each; "
                "pass every=, or no scheduler"
            )
        return by_scheduler if step is None and self.every == 1 else step

    def asked(self, number: int, problems: list[str]) -> int:
        problems.append(f"nothing tells how many updates group {number} has had; pass step=")
        return 0

    def to_torch(self, source: Any, target: Any) -> OptimizerTransfer:
        """The twin's state in torch's."""
        room = frameworks.load("optax")
        there = room.read_state(source)
        kind, problems = self.optimizer.kind, list[str]()
        state: Tensors = {}
        steps: list[int | None] = []
        for number, group in enumerate(self.optimizer.groups):
            count = there.counts.get(number, self.step)
            steps.append(count)
            if count is None and kind != "SGD" and any(self.joined(name, there.tensors) for name in group.names):
                self.asked(number, problems)
            for name in group.names:
                entries = self.joined(name, there.tensors)
                # torch makes the state of a parameter in its first step, Adagrad's at once.
                if entries and (count != 0 or kind == "Adagrad"):
                    state[name] = entries | there.scalars.get(number, {}) | ({} if kind == "SGD" else {"step": count or 0})
        problems += self.too_far(steps)
        if problems:
            raise TransferError(listed("optimizer state refused, nothing was written", problems), problems)
        frameworks.load("torch.optimizers").write_state(target, self.found.names, state)
        if self.scheduler is not None:
            frameworks.load("torch.schedulers").advance(self.scheduler, (steps[0] or 0) // self.every)
        arrays = tuple((name, entry) for name, entries in state.items() for entry in entries if entry in TENSORS[kind])
        return OptimizerTransfer(target, arrays, tuple(steps))

    def too_far(self, steps: list[int | None]) -> list[str]:
        """Why the scheduler cannot follow."""
        if self.scheduled is None:
            return []
        if len(set(steps)) > 1 or steps[0] is None:
            return [f"the groups have had {steps} updates: there is no one number for the scheduler; pass step="]
        if self.scheduled > steps[0] // self.every:
            taken = steps[0] // self.every
            return [f"the scheduler has taken {self.scheduled} steps and the run {taken}; give one that is made anew"]
        return []

    def joined(self, name: str, there: Tensors) -> dict[str, np.ndarray]:
        """A parameter's arrays in torch's layout; empty if the twin keeps none."""
        places = {p.source.path: (p, path) for p in self.found.pairs.get(name, ()) if (path := path_in(p, there))}
        found: dict[str, np.ndarray] = {}
        for entry in set().union(*(there[path] for _, path in places.values())):
            parts = [(p.source, p.layout.inverse().apply(p.target.of(there[path][entry]))) for p, path in places.values()]
            found[entry] = next(iter(gathered(parts).values()))
        return found


def path_in(p: Pair, there: Tensors) -> str | None:
    """The name of a leaf in a state: Linen's `params` may be missing there."""
    path = p.target.array_path
    return next((name for name in (path, path.removeprefix("params.")) if name in there), None)


def only(values: set[Any]) -> Any:
    """The one element, None if there is none."""
    return next(iter(values)) if len(values) == 1 else None


def unlike(name: str, have: set[str], want: set[str]) -> str:
    if not have:
        return f"torch has no state for {name}: it never had a gradient; pass unused={name!r} to to_optax if it never gets one"
    if not want:
        return f"the twin leaves {name} alone, but torch has {', '.join(sorted(have))} for it; make the twin anew"
    return f"torch has {', '.join(sorted(have))} for {name}, the twin {', '.join(sorted(want))}; make the twin anew"


def widths(name: str, entry: str, array: np.ndarray, other: np.ndarray) -> str:
    return (
        f"{entry} of {name} is {array.dtype} in torch and {other.dtype} in the twin; give both models one dtype "
        '(float64 needs jax.config.update("jax_enable_x64", True))'
    )
