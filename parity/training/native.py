"""The same steps in the dtype in which the models are deployed, each from the state that torch has before it.

Rounding has no time to grow, so that each step can be judged by the rule of the level `native`: Flax's error
against torch in float64, from that same state, is held against torch's own. The optimizer's step is taken on
torch's gradients on both sides: Adam's first is the sign of a gradient, which rounding may turn.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from parity.errors import DivergenceError
from parity.evidence.ladder import magnitudes
from parity.evidence.numerics import UNIT, finite_scale, precision, wide
from parity.training.following import compared, sent
from parity.training.outcome import NativeStep
from parity.training.states import transfer_optimizer
from parity.weights.pairing import Pairing

# Runs of torch that are moved by rounding, of each kind; made only where the plain run does not explain an error. So a
# ratio of 0.97 is not nearly a failure: of 90 steps of 45 seeds the plain run gave 0.38 in the middle and 1.4 at most, all
# nine runs 0.15 and 0.37. One run may be right by luck where another is not.
FURTHER = 4

Arrays = Mapping[str, np.ndarray]


class NativeFollower:
    """Single steps, each from torch's state.

    Args:
        mine: torch's run in its own dtype.
        theirs: Flax's run in its own.
        flax_model: that it is a copy of.
        pairing: of the two models.
        dtype: that both have.
        options: of `parity.transfer_optimizer`.
        twin: whether the transformation is the twin of torch's optimizer, so that torch's state fits it.
        begun: steps that schedules have had before the first step.
    """

    def __init__(
        self,
        mine: Any,
        theirs: Any,
        flax_model: Any,
        pairing: Pairing,
        dtype: str,
        options: Mapping[str, Any],
        twin: bool,
        begun: int,
    ):
        self.mine, self.theirs, self.flax_model, self.pairing = mine, theirs, flax_model, pairing
        self.dtype, self.options, self.twin, self.begun = dtype, options, twin, begun
        self.skips = 0
        self.steps: list[NativeStep] = []
        # What only one side has, such as a second bias of a recurrent layer, has no gradient that could be sent.
        self.sendable = not (pairing.aside or pairing.zeros)

    def step(self, batches: Sequence[Any]) -> None:
        """One step of both."""
        mine, theirs, number = self.mine, self.theirs, len(self.steps) + 1
        before = mine.values()
        oracle, stepped, start = mine.forked("float64"), mine.forked("float64"), mine.forked()
        self.place(before)
        _, gradients, masks = mine.gradients(batches)
        given = masks if mine.recipe.dropout else None
        oracle.gradients(batches, given)
        try:
            _, raw = theirs.gradients(batches, given)
        except DivergenceError:
            # Said by the float64 run already.
            return
        mine_finite = not mine.skipped
        errors, buffers = self.of_forward(start, batches, given, gradients, oracle, theirs.unscaled(raw))
        errors = errors if mine_finite else {}
        flax_finite = all(np.isfinite(np.asarray(g)).all() for g in raw.values())
        if mine.scaler is not None and mine_finite != flax_finite:
            errors["the loss scale"] = np.inf
        # Counted from the same place, and only where it matters.
        near = largest(errors) > 1 and start.forked("float64").kinks(batches, given, UNIT[self.dtype]) > 0
        stepped.take(gradients)
        stepped.update(scheduled=False)
        self.skips += mine.skipped
        mine.update(scheduled=number % mine.recipe.every == 0)
        values = self.of_values(gradients, stepped) if self.twin and self.sendable else None
        everything = {**({} if near else errors), **buffers, **(values or {})}
        worst = max(everything, key=everything.__getitem__, default="")
        self.steps.append(
            NativeStep(number, largest(errors), None if values is None else largest(values), largest(buffers), worst, near)
        )

    def place(self, values: Arrays) -> None:
        """Put Flax where torch is."""
        self.theirs.load(sent(self.pairing, values))
        if not self.twin:
            return
        gone = len(self.steps)
        options = {**self.options, "step": self.begun + gone - self.skips}
        # Schedules go on where a step is skipped, and the optimizer's own count does not.
        options |= {"scheduler": None} if self.skips else {}
        if self.mine.optimizer.state:
            told = transfer_optimizer(self.mine.optimizer, self.theirs.state, self.mine.model, self.flax_model, **options)
            self.theirs.state = told.value
        self.theirs.scale_like(self.mine.scale)
        if self.skips:
            self.theirs.schedule_from(self.begun + gone)

    def judged(self, actual: np.ndarray, runs: list[np.ndarray], true: np.ndarray, scale: float) -> float:
        result = precision(actual, runs, true, self.dtype, scale)
        return max(result.max_ratio, result.rms_ratio)

    def again(self, start: Any, batches: Any, given: Any) -> Iterator[list[tuple[Mapping[str, Any], Arrays]]]:
        """Gradients and values of torch's further runs, ever more: on parameters moved by rounding, then on results too."""
        runs: list[tuple[Mapping[str, Any], Arrays]] = []
        for shaken in (False, True):
            for number in range(FURTHER):
                run = start.forked(None, np.random.default_rng(number))
                found = run.gradients(batches, given, shake=101 + number if shaken else None)[1]
                runs.append((found, run.values()))
            yield runs

    def of_forward(
        self, start: Any, batches: Any, given: Any, own: Mapping[str, Any], oracle: Any, actual: Arrays
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Errors of gradients, and of running statistics, over what is allowed, by torch's name."""
        true = {name: g for name, g in oracle.last_gradients.items() if g is not None and own.get(name) is not None}
        scales = magnitudes(true)
        gradients = compared(self.pairing, true, actual)
        mine = self.mine.values()
        names = {n for n, array in mine.items() if n not in self.mine.names.values() and "float" in str(array.dtype)}
        buffers = compared(self.pairing, {n: a for n, a in oracle.values().items() if n in names}, self.theirs.values())

        def errors(runs: list[tuple[Mapping[str, Any], Arrays]]) -> tuple[dict[str, float], dict[str, float]]:
            return (
                {n: self.judged(f, [own[n], *(g[n] for g, _ in runs)], t, scales[n]) for n, t, f in gradients},
                {n: self.judged(f, [mine[n], *(v[n] for _, v in runs)], wide(t), finite_scale(t)) for n, t, f in buffers},
            )

        found = errors([])
        for runs in self.again(start, batches, given) if max(map(largest, found)) > 1 else ():
            found = errors(runs)
            if max(map(largest, found)) <= 1:
                break
        return found

    def of_values(self, gradients: Mapping[str, Any], stepped: Any) -> dict[str, float]:
        """Errors of parameters behind a step that both take on torch's gradients."""
        known = {name: g for name, g in gradients.items() if g is not None}
        told = sent(self.pairing, known)
        scale = self.theirs.scale
        full = {n: np.asarray(told[n]) * scale if n in told else np.zeros_like(p) for n, p in self.theirs.arrays_now().items()}
        self.theirs.update(self.theirs.as_gradients(full))
        own = self.mine.values()
        parameters = set(self.mine.names.values())
        true = {name: array for name, array in stepped.values().items() if name in parameters}
        pairs = compared(self.pairing, true, self.theirs.values())
        return {name: self.judged(f, [own[name]], wide(t), finite_scale(t)) for name, t, f in pairs}


def largest(errors: Mapping[str, float]) -> float:
    """NaN counts as the largest."""
    return float(max((np.inf if np.isnan(error) else error for error in errors.values()), default=0.0))
