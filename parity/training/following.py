"""Both runs in float64, step by step, with what is needed to say why they part."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from parity.errors import DivergenceError
from parity.evidence.faults import Cause
from parity.evidence.ladder import in_torch
from parity.training import causes, statistics
from parity.training.outcome import Drift, Training
from parity.training.ports import Port, Taken
from parity.training.statistics import Statistic
from parity.weights.leaf import gathered
from parity.weights.pairing import Pairing
from parity.weights.pairs import Pair

# What is left of a gradient that is zero in exact arithmetic, as a part of the largest gradient.
NOISE = 1e-13
# What torch's own run may come from itself by rounding, times this, is rounding.
OWN_FACTOR = 64.0
# Steps that are looked at behind the first that parts, and elements of an array that are kept of each.
FURTHER, KEPT = 6, 256
TINY = float(np.finfo(np.float64).tiny)

Arrays = Mapping[str, np.ndarray]
Compared = list[tuple[str, np.ndarray, np.ndarray]]


def compared(pairing: Pairing, mine: Arrays, theirs: Arrays) -> Compared:
    """Torch's name, torch's array, and Flax's in torch's layout, for every array that both have."""
    parts: dict[str, list[Pair]] = {}
    for p in pairing.pairs:
        if p.source.array_path in mine and p.target.array_path in theirs:
            parts.setdefault(p.source.array_path, []).append(p)
    return [
        (name, mine[name], in_torch(name, pairs, [p.target.array_path for p in pairs], theirs, mine[name]))
        for name, pairs in parts.items()
    ]


def sent(pairing: Pairing, arrays: Arrays) -> dict[str, np.ndarray]:
    """Torch's arrays by name as Flax's by path, as far as a transfer would make them of these alone."""
    found = []
    for p in pairing.pairs:
        if p.source.array_path in arrays:
            found.append((p.target, np.asarray(p.layout.apply(p.source.of(arrays[p.source.array_path])))))
    return gathered(found)


def past(allowed: float, errors: Mapping[str, float]) -> tuple[str, ...]:
    """What differs by more than is allowed, worst first; NaN does."""
    return tuple(sorted((name for name, error in errors.items() if not error <= allowed), key=lambda name: -errors[name]))


def gap(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Differences by element: 0 where both are the same NaN or infinity, infinite where only one is."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    return np.where(same, 0.0, np.where(np.isfinite(difference), difference, np.inf))


def apart(actual: np.ndarray, expected: np.ndarray, alive: np.ndarray | None) -> tuple[float, int]:
    """The largest difference as a part of the largest value, and how many elements differ that have no gradient."""
    if actual.shape != expected.shape or not actual.size:
        return (0.0 if actual.shape == expected.shape else np.inf), 0
    difference = gap(actual, expected)
    idle = 0
    if alive is not None:
        idle = int(((difference > 0) & ~alive).sum())
        difference = np.where(alive, difference, 0.0)
    finite = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
    return float(difference.max() / max(finite, TINY)) if difference.any() else 0.0, idle


def finite_largest(arrays: Compared) -> float:
    sizes = (np.abs(a[np.isfinite(a)]).max(initial=0.0) for _, *both in arrays for a in both)
    return float(max(sizes, default=0.0))


@dataclass
class History:
    """What Flax did, as far as it is needed to tell why; of each array a sample.

    Attributes:
        port: torch's optimizer.
        start: its parameters before the first step.
        steps: that Flax took.
        statistics: running statistics that part, in the first step in which one does.
        batches: accumulated for each step.
    """

    port: Port
    start: dict[str, np.ndarray]
    batches: int
    steps: list[Taken] = field(default_factory=list)
    statistics: list[Statistic] = field(default_factory=list)

    def add(self, gradients: Arrays, values: Arrays) -> None:
        """Keep one step: Flax's gradients and parameters, in torch's layout."""
        moving = [name for group in self.port.groups for name in group.names if name in gradients]
        with np.errstate(over="ignore", invalid="ignore"):
            norm = float(np.sqrt(sum(float((gradients[name].astype(np.float64) ** 2).sum()) for name in moving)))
        known = {name: sample(name, gradients[name]) for name in moving}
        self.steps.append(Taken(known, norm, {name: sample(name, values[name]) for name in moving if name in values}))

    def causes(self, allowed: float) -> tuple[Cause, ...]:
        """What explains that the two part."""
        found = statistics.explained(self.statistics, allowed)
        # What has a gradient in some steps only is no optimizer's doing.
        always = set.intersection(*({*step.values} for step in self.steps)) if self.steps else set()
        kept = {name: array for name, array in self.start.items() if name in always}
        finite = [step for step in self.steps if np.isfinite(step.norm)]
        if not kept or len(finite) < len(self.steps):
            return found
        steps = tuple(replace(step, values={name: step.values[name] for name in kept}) for step in self.steps)
        seen = causes.Observed(self.port, kept, steps, allowed, self.batches)
        return (*found, *causes.explained(seen))


def sample(name: str, array: np.ndarray) -> np.ndarray:
    """The same few elements of an array every time, in float64."""
    flat = array.reshape(-1)
    if flat.size > KEPT:
        chosen = np.random.default_rng(zlib.crc32(name.encode())).choice(flat.size, KEPT, replace=False)
        flat = flat[np.sort(chosen)]
    return flat.astype(np.float64)


class Follower:
    """Two runs side by side.

    Args:
        mine: torch's run.
        theirs: Flax's.
        pairing: of the two models.
        every: steps to each step of the scheduler.
        allowed: largest difference, as a part of an array's largest value.
        port: torch's optimizer in the words of no framework; None if it has none.
        momenta: by torch's name of a running statistic, the share of a batch.
    """

    def __init__(
        self,
        mine: Any,
        theirs: Any,
        pairing: Pairing,
        every: int,
        allowed: float,
        port: Port | None,
        momenta: Mapping[str, float],
    ):
        self.mine, self.theirs, self.pairing, self.every, self.allowed = mine, theirs, pairing, every, allowed
        self.momenta = momenta
        self.drift: list[Drift] = []
        self.parted: tuple[str, ...] = ()
        self.first: int | None = None
        # The elements that have had a gradient so far.
        self.alive: dict[str, np.ndarray] = {}
        self.quiet: dict[str, int] = {}
        self.notes: list[str] = []
        # Torch's paths of what drops in the first step.
        self.places: tuple[str, ...] = ()
        # What had no gradient in the step before, and whether a change was told.
        self.missing: frozenset[str] | None = None
        self.changing = False
        # From where on neither loss is a number.
        self.no_number: int | None = None
        self.dropout = ""
        self.before = dict(mine.values())
        start = {name: sample(name, array) for name, array in self.before.items()}
        self.history = None if port is None else History(port, start, mine.recipe.accumulate)
        # The same steps again on parameters that are moved by rounding; begun where it is needed.
        self.own: Any = None
        self.fresh = mine.forked("float64", np.random.default_rng(0))
        self.taken: list[tuple[Any, Any]] = []

    def step(self, batches: Sequence[Any]) -> None:
        """One step of both."""
        number = len(self.drift) + 1
        drawn = self.mine.generators()
        self.taken.append((batches, drawn))
        scale = self.mine.scale
        value, gradients, masks = self.mine.gradients(batches)
        if number == 1 and self.mine.recipe.dropout:
            self.places = tuple(dict.fromkeys(drop.path for one in masks for drop in one.drops))
        try:
            other, raw = self.theirs.gradients(batches, masks if self.mine.recipe.dropout else None)
        except DivergenceError as error:
            # Torch's masks have no place in the Flax model: what is wrong has been said, and there is no step to take.
            self.first, self.dropout = number, str(error)
            return
        flax_gradients = self.theirs.unscaled(raw)
        self.mine.update(scheduled=number % self.every == 0)
        self.theirs.update(raw if not self.theirs.alone else self.theirs.last)
        known = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        self.tell_missing(number, gradients)
        pairs = compared(self.pairing, known, flax_gradients)
        behind = compared(self.pairing, self.mine.values(), self.theirs.values())
        by_gradient, by_value = self.measured(pairs, behind)
        worst = max(by_value, key=by_value.__getitem__, default="")
        # A step may hide what gradients show: the first of Adam is their sign.
        wrong = past(self.allowed, by_gradient) or past(self.allowed, by_value)
        if self.mine.skipped != self.theirs.skipped:
            side, rest = ("torch", "Flax") if self.mine.skipped else ("Flax", "torch")
            self.notes.append(f"step {number}: {side} skips it, for a gradient is not finite; {rest} does not")
        own = None
        if wrong:
            own_gradients, own_values = self.rounding(number)
            own = max([*own_values.values(), 0.0])
            wrong = self.unexplained(by_gradient, own_gradients) or self.unexplained(by_value, own_values)
        buffers = max((error for name, error in by_value.items() if name not in gradients), default=0.0)
        most = max(by_gradient.values(), default=0.0)
        if not np.isfinite(value) and not np.isfinite(other) and self.no_number is None:
            self.no_number = number
        figures = (number, value, other - value, most, by_value.get(worst, 0.0), worst, buffers)
        self.drift.append(Drift(*figures, scale, self.mine.skipped, own))
        if self.first is None and wrong:
            self.first, self.parted = number, wrong
            self.remember_statistics(behind, wrong, gradients)
        if self.history is not None and (self.first is None or number < self.first + FURTHER):
            self.history.add({name: f for name, _, f in pairs}, {name: f for name, _, f in behind})
        self.before = {name: t for name, t, _ in behind}

    def tell_missing(self, number: int, gradients: Mapping[str, Any]) -> None:
        """Note once what has a gradient in some steps only: torch passes it over in the others, JAX has a gradient of 0."""
        missing = frozenset(name for name, gradient in gradients.items() if gradient is None)
        before = self.missing
        self.missing = missing
        if before is None or missing == before or self.changing:
            return
        self.changing = True
        names = ", ".join(sorted(missing ^ before))
        here, there = ("a gradient", "none") if before - missing else ("no gradient", "one")
        self.notes.append(
            f"step {number}: {names} gets {here} in torch, and got {there} before. torch passes over what has none, moments, "
            "decay and count, where JAX has a gradient of 0: add 0 * p.sum() of each to torch's loss, so that both have 0"
        )

    def measured(self, pairs: Compared, behind: Compared) -> tuple[dict[str, float], dict[str, float]]:
        """Differences of gradients, as a part of the largest gradient, and of values behind the step, of their largest."""
        largest = finite_largest(pairs)
        by_gradient = {}
        for name, t, f in pairs:
            # Of either side: torch gives a padding row no gradient, Flax one.
            with np.errstate(invalid="ignore"):
                seen = ~(np.maximum(np.abs(t), np.abs(f)) <= NOISE * largest)
            self.alive[name] = self.alive.get(name, np.zeros(t.shape, bool)) | seen
            by_gradient[name] = float(gap(f, t).max(initial=0.0) / max(largest, TINY))
        by_value = {}
        for name, t, f in behind:
            by_value[name], self.quiet[name] = apart(f, t, self.alive.get(name))
        return by_gradient, by_value

    def unexplained(self, errors: Mapping[str, float], own: Mapping[str, float]) -> tuple[str, ...]:
        """What differs by more than is allowed, and than torch's own rounding explains."""
        wrong = past(self.allowed, errors)
        return tuple(name for name in wrong if not errors[name] <= OWN_FACTOR * own.get(name, 0.0))

    def rounding(self, number: int) -> tuple[dict[str, float], dict[str, float]]:
        """How far torch's run has come from one on parameters that were moved by rounding: gradients, and values."""
        if self.own is None:
            self.own, self.caught_up = self.fresh, 0
        here = self.mine.generators()
        gradients: dict[str, Any] = {}
        for step in range(self.caught_up + 1, number + 1):
            batches, drawn = self.taken[step - 1]
            self.own.draw_from(drawn)
            _, gradients, _ = self.own.gradients(batches)
            self.own.update(scheduled=step % self.every == 0)
        self.caught_up = number
        self.mine.draw_from(here)
        known = {n: g for n, g in self.mine.last_gradients.items() if g is not None and gradients.get(n) is not None}
        largest = max((float(np.abs(g[np.isfinite(g)]).max(initial=0.0)) for g in known.values()), default=0.0)
        by_gradient = {n: float(gap(gradients[n], g).max(initial=0.0) / max(largest, TINY)) for n, g in known.items()}
        values, moved = self.mine.values(), self.own.values()
        return by_gradient, {name: apart(moved[name], t, self.alive.get(name))[0] for name, t in values.items()}

    def remember_statistics(self, behind: Compared, wrong: tuple[str, ...], gradients: Mapping[str, Any]) -> None:
        if self.history is not None:
            # Every batch of a step moves them once more.
            share = {name: 1 - (1 - momentum) ** self.history.batches for name, momentum in self.momenta.items()}
            self.history.statistics = [
                Statistic(name, self.before[name], t, f, share[name])
                for name, t, f in behind
                if name in wrong and name in self.momenta and name not in gradients
            ]

    def outcome(self, unused: tuple[str, ...], mode: str) -> Training:
        """What was seen."""
        noise = tuple((name, count) for name, count in self.quiet.items() if count)
        rounded = [drift.step for drift in self.drift if drift.rounding is not None]
        if rounded and self.first != rounded[0]:
            self.notes.append(
                f"from step {rounded[0]} on torch parts from itself by the rounding of its first parameters alone: "
                f"differences up to {OWN_FACTOR:g} times that count as the same"
            )
        if self.no_number is not None:
            self.notes.append(
                f"in step {self.no_number} the loss is no number on either side: what such steps have in common proves nothing"
            )
        found = self.history.causes(self.allowed) if self.history is not None and self.first is not None else ()
        result = Training(
            tuple(self.drift), self.allowed, self.parted, self.first, noise, unused, mode=mode, dropout=self.dropout
        )
        return replace(result, causes=found, notes=tuple(self.notes))
