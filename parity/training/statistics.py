"""Why running statistics part: what ports get wrong, read off the numbers of one step."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from parity.evidence.faults import Cause

TINY = float(np.finfo(np.float64).tiny)

# The causes, in their own words.
CAUSES = {
    "running variance": "The variance of the batch is divided by n where torch keeps it divided by n - 1.",
    "momentum of statistics": "Momentum is the share that is kept, where torch's is the share that is new.",
    "running statistics": "A running statistic is not moved, or is that of the batch alone.",
}


@dataclass(frozen=True)
class Statistic:
    """A running statistic in the first step in which it parts.

    Attributes:
        name: torch's.
        before: it, alike on both sides.
        torch: behind the step.
        flax: behind the step.
        momentum: the share of the batch's own that torch takes.
    """

    name: str
    before: np.ndarray
    torch: np.ndarray
    flax: np.ndarray
    momentum: float

    @property
    def batch(self) -> np.ndarray:
        """What torch found in the batch."""
        return (self.torch - (1 - self.momentum) * self.before) / self.momentum


def candidates(one: Statistic) -> Iterator[tuple[str, str, str, np.ndarray]]:
    """Cause, what it does, what to change, and the statistic that it would give."""
    m, batch = one.momentum, one.batch
    biased = "the variance of the batch is divided by n, not by n - 1 as torch divides what it keeps"
    unbias = "multiply what goes into the running variance by n / (n - 1)"
    share = f"Flax's momentum is the share that is kept, torch's the one that is new: momentum={1 - m:g} in Flax"
    factors = biased_by(one, m)
    if factors:
        n, value = factors
        yield "running variance", f"{biased}, with n = {n}", unbias, (1 - m) * one.before + m * value
    yield (
        "momentum of statistics",
        f"{m:g} of the old statistic is kept, torch keeps {1 - m:g}",
        share,
        m * one.before + (1 - m) * batch,
    )
    turned = biased_by(one, 1 - m)
    if turned:
        n, value = turned
        yield (
            "running variance and momentum of statistics",
            f"{biased}, with n = {n}; and {m:g} of the old is kept, torch keeps {1 - m:g}",
            f"{unbias}; {share}",
            m * one.before + (1 - m) * value,
        )
    yield (
        "running statistics",
        "it is not moved",
        "let the layer train: use_running_average=False, mutable in Linen",
        one.before,
    )
    yield "running statistics", "it is that of the batch alone", f"keep {1 - m:g} of the old one", batch


def biased_by(one: Statistic, share: float) -> tuple[int, np.ndarray] | None:
    """For a variance: n, and the batch's own divided by n, where that is what Flax took."""
    theirs = (one.flax - (1 - share) * one.before) / share
    known = np.abs(one.batch) > 1e-6 * np.abs(one.batch).max(initial=TINY)
    if not known.any() or "var" not in one.name:
        return None
    factor = float(np.median(theirs[known] / one.batch[known]))
    if not 0 < factor < 1:
        return None
    n = round(1 / (1 - factor))
    return (n, one.batch * (n - 1) / n) if n > 1 else None


def explained(statistics: list[Statistic], allowed: float) -> tuple[Cause, ...]:
    """For each running statistic that parts, the first cause that gives Flax's numbers."""
    found: dict[tuple[str, str], list[Cause]] = {}
    for one in statistics:
        scale = max(float(np.abs(one.torch).max(initial=0.0)), TINY) * allowed
        before = float(np.abs(one.torch - one.flax).max(initial=0.0)) / scale
        for name, what, change, value in candidates(one):
            after = float(np.abs(value - one.flax).max(initial=0.0)) / scale
            if before > 1 and after <= 1:
                cause = Cause(name, one.name, f"In {one.name} {what}", change, before, after, (one.name,), True)
                found.setdefault((name, what), []).append(cause)
                break
    return tuple(causes[0] for causes in found.values())
