"""Learning rates as functions of the number of updates so far, in the words of no framework.

An optimizer step of torch uses the rate that stands in its group. The constructor of a
scheduler puts the first one there, and `scheduler.step()` behind `optimizer.step()` the next,
so that update number t, counted from 0, uses the rate after t steps of the scheduler. optax
calls a schedule with its count before it increments it: 0 at the first update. So `at(t)` is
the rate after t steps of the scheduler, and the two counts need no shift. With `every` updates
to a step of the scheduler (once an epoch, say), t is the count divided by that, rounded down.

torch computes most schedules from the previous rate, so that rounding errors pile up; the
formulas here are what it computes in exact arithmetic. Measured over 1,000 steps they are within
1e-12 of the largest rate, save for `CosineAnnealingLR` behind its first minimum: torch's own
recursion starts there from a difference of two nearly equal numbers and is off by
3e-16 T_max^2. A `Table` is what torch itself computed, bit for bit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class Schedule(Protocol):
    """A hyperparameter as a function of the steps of its scheduler."""

    def at(self, t: Any, xp: Any = np) -> Any:
        """The value after t steps.

        Args:
            t: a whole number or an array of them.
            xp: numpy, or what has its functions, such as jax.numpy.
        """


# A hyperparameter that stays, or one that a scheduler moves.
Hyper = float | Schedule


def power(base: float, exponent: Any, xp: Any) -> Any:
    """`base ** exponent`; in float32 good to rounding too, where a rounded base would lose digits with every step."""
    return xp.exp(exponent * math.log(base))


@dataclass(frozen=True)
class StepLR:
    """`base gamma^(t // size)`."""

    base: float
    gamma: float
    size: int

    def at(self, t: Any, xp: Any = np) -> Any:
        return self.base * power(self.gamma, t // self.size, xp)


@dataclass(frozen=True)
class MultiStepLR:
    """`base gamma^(milestones up to t)`; a milestone may stand there several times."""

    base: float
    gamma: float
    milestones: tuple[int, ...]

    def at(self, t: Any, xp: Any = np) -> Any:
        return self.base * power(self.gamma, xp.searchsorted(xp.asarray(self.milestones), t, side="right"), xp)


@dataclass(frozen=True)
class ConstantLR:
    """`base factor` for the first steps, then `base`. For no step at all torch never takes the factor back."""

    base: float
    factor: float
    steps: int

    def at(self, t: Any, xp: Any = np) -> Any:
        return self.base * xp.where((t < self.steps) | (self.steps == 0), self.factor, 1.0)


@dataclass(frozen=True)
class LinearLR:
    """A straight line between two factors. For no step at all torch stays at the first."""

    base: float
    start: float
    end: float
    steps: int

    def at(self, t: Any, xp: Any = np) -> Any:
        return self.base * (self.start + (self.end - self.start) * xp.minimum(t, self.steps) / max(self.steps, 1))


@dataclass(frozen=True)
class ExponentialLR:
    """`base gamma^t`."""

    base: float
    gamma: float

    def at(self, t: Any, xp: Any = np) -> Any:
        return self.base * power(self.gamma, t, xp)


@dataclass(frozen=True)
class PolynomialLR:
    """`base (1 - t / steps)^power`, then 0."""

    base: float
    power: float
    steps: int

    def at(self, t: Any, xp: Any = np) -> Any:
        # Not `1 - t / steps`: compiled, that may end below 0, of which a power is NaN.
        return self.base * ((self.steps - xp.minimum(t, self.steps)) / self.steps) ** self.power


@dataclass(frozen=True)
class CosineAnnealingLR:
    """Half a cosine from `base` down to `low` in `half` steps, and up again: torch does not stop there."""

    base: float
    low: float
    half: float

    def at(self, t: Any, xp: Any = np) -> Any:
        return self.low + (self.base - self.low) * (1 + xp.cos(math.pi * t / self.half)) / 2


@dataclass(frozen=True)
class CosineAnnealingWarmRestarts:
    """Half a cosine again and again, each `growth` times as long as the one before."""

    base: float
    low: float
    first: int
    growth: int

    def at(self, t: Any, xp: Any = np) -> Any:
        if self.growth == 1:
            done, length = t % self.first, self.first
        else:
            # As whole numbers: torch counts them, and a logarithm would round across a restart.
            starts, lengths = [0], [self.first]
            while starts[-1] + lengths[-1] < 2**31:
                starts.append(starts[-1] + lengths[-1])
                lengths.append(lengths[-1] * self.growth)
            cycle = xp.searchsorted(xp.asarray(starts), t, side="right") - 1
            done, length = t - xp.asarray(starts)[cycle], xp.asarray(np.asarray(lengths, np.float64))[cycle]
        return self.low + (self.base - self.low) * (1 + xp.cos(math.pi * done / length)) / 2


@dataclass(frozen=True)
class OneCycleLR:
    """Values joined by half cosines or straight lines; NaN past the last step, where torch raises.

    Attributes:
        values: at the ends of the phases.
        ends: the steps at which the phases end, fractions allowed.
        cosine: half cosines, otherwise straight lines.
        last: the last step that torch allows.
    """

    values: tuple[float, ...]
    ends: tuple[float, ...]
    cosine: bool
    last: int

    def at(self, t: Any, xp: Any = np) -> Any:
        starts = (0.0, *self.ends[:-1])
        found = xp.full_like(t * 1.0, math.nan)
        # The last phase first: of those that have not ended, torch takes the earliest.
        for phase in reversed(range(len(self.ends))):
            done = (t - starts[phase]) / (self.ends[phase] - starts[phase])
            first, second = self.values[phase : phase + 2]
            cosine = second + (first - second) / 2 * (1 + xp.cos(math.pi * done))
            end = self.last if phase == len(self.ends) - 1 else self.ends[phase]
            found = xp.where(t <= end, cosine if self.cosine else (second - first) * done + first, found)
        return found


@dataclass(frozen=True)
class CyclicLR:
    """A triangle between `low` and `high`.

    Attributes:
        low: where it starts.
        high: the top of the first triangle.
        up: steps from the bottom to the top.
        down: steps from the top to the bottom.
        mode: `triangular`, `triangular2` (half as high each time) or `exp_range` (times `gamma^t`).
        gamma: for `exp_range`.
    """

    low: float
    high: float
    up: float
    down: float
    mode: str
    gamma: float

    def at(self, t: Any, xp: Any = np) -> Any:
        length = self.up + self.down
        cycle = xp.floor(1 + t / length)
        place, top = 1.0 + t / length - cycle, self.up / length
        height = (self.high - self.low) * xp.where(place <= top, place / top, (place - 1) / (top - 1))
        scale = {"triangular2": 2.0 ** (1 - cycle), "exp_range": power(self.gamma, t, xp)}.get(self.mode, 1.0)
        return self.low + height * scale


@dataclass(frozen=True)
class Sequence:
    """One schedule after the other, each counted from the step at which it begins."""

    schedules: tuple[Schedule, ...]
    milestones: tuple[int, ...]

    def at(self, t: Any, xp: Any = np) -> Any:
        found = self.schedules[0].at(t, xp)
        for schedule, start in zip(self.schedules[1:], self.milestones, strict=True):
            found = xp.where(t >= start, schedule.at(xp.maximum(t - start, 0), xp), found)
        return found


@dataclass(frozen=True)
class Product:
    """The base rate times factors."""

    base: float
    factors: tuple[Schedule, ...]

    def at(self, t: Any, xp: Any = np) -> Any:
        found = self.base
        for factor in self.factors:
            found = found * factor.at(t, xp)
        return found


@dataclass(frozen=True)
class Table:
    """Values step by step, from a first step on; NaN outside, since nothing is known there."""

    start: int
    values: tuple[float, ...]

    def at(self, t: Any, xp: Any = np) -> Any:
        place = t - self.start
        inside = (place >= 0) & (place < len(self.values))
        return xp.where(inside, xp.asarray(self.values)[xp.clip(place, 0, len(self.values) - 1)], math.nan)


@dataclass(frozen=True)
class Every:
    """A schedule that moves on with every so many updates."""

    schedule: Schedule
    updates: int

    def at(self, t: Any, xp: Any = np) -> Any:
        return self.schedule.at(t // self.updates, xp)


# What schedulers do to one parameter group: an option's name, or `beta1`, and its schedule.
Moved = Mapping[str, Schedule]
