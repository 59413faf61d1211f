"""What training both models shows: frozen values that can print themselves."""

from dataclasses import dataclass
from typing import Any

from parity.errors import DivergenceError
from parity.evidence.faults import Cause


@dataclass(frozen=True)
class Drift:
    """How far two runs are apart in one step.

    Attributes:
        step: counted from 1.
        loss: torch's, before the step.
        loss_difference: Flax's less torch's.
        gradients: largest difference of a gradient before the step, as a part of the largest gradient.
        values: largest difference of a parameter or buffer after it, as a part of its largest value.
        worst: torch's name of that one.
        buffers: largest difference of a running statistic after it, as a part of its largest value.
        scale: by which the loss was multiplied.
        skipped: whether torch skipped the step, because a gradient was not finite.
        rounding: how far torch's own run has come from itself by the rounding of its first parameters, likewise;
            None where that was not needed to tell.
    """

    step: int
    loss: float
    loss_difference: float
    gradients: float
    values: float
    worst: str
    buffers: float = 0.0
    scale: float = 1.0
    skipped: bool = False
    rounding: float | None = None

    @property
    def flax_loss(self) -> float:
        """Flax's loss, before the step; NaN where the difference is none."""
        return self.loss + self.loss_difference


@dataclass(frozen=True)
class NativeStep:
    """One step in the dtype of the models, from the state that torch has before it.

    Attributes:
        step: counted from 1.
        gradients: the largest error of a gradient of Flax over what is allowed by torch's own.
        values: that of a parameter behind the step, taken on torch's gradients; None if it was not taken.
        buffers: that of a running statistic.
        worst: torch's name of what has the largest of them.
        kinks: whether values lie so near a kink that gradients were not judged.
    """

    step: int
    gradients: float
    values: float | None
    buffers: float
    worst: str
    kinks: bool = False

    @property
    def ratio(self) -> float:
        """The largest error over the allowed one."""
        return max(0.0 if self.kinks else self.gradients, self.values or 0.0, self.buffers)


@dataclass(frozen=True)
class Training:
    """The outcome of training both models.

    Attributes:
        drift: step by step, in float64.
        allowed: the largest difference that counts as the same.
        parted: torch's names of what differs in the first step that shows a difference, worst first: gradients
            before it, or if they agree, values after it.
        first: that step; None if there is none.
        noise: torch's names of arrays that hold elements whose gradient is rounding alone, with their number.
        unused: torch's names of parameters that get no gradient, and are left alone on both sides.
        native: the same steps in the dtype of the models, each from torch's state; empty if they were not taken.
        causes: what would explain the first difference, the best first.
        mode: how Flax ran, compiled or eager.
        dropout: why torch's masks have no place in the Flax model; '' if they have.
        notes: what a reader must know.
    """

    drift: tuple[Drift, ...]
    allowed: float
    parted: tuple[str, ...] = ()
    first: int | None = None
    noise: tuple[tuple[str, int], ...] = ()
    unused: tuple[str, ...] = ()
    native: tuple[NativeStep, ...] = ()
    causes: tuple[Cause, ...] = ()
    mode: str = "compiled"
    dropout: str = ""
    notes: tuple[str, ...] = ()

    @property
    def imprecise(self) -> NativeStep | None:
        """The first step that is not as precise as torch's in the dtype of the models; None if all are."""
        return next((step for step in self.native if not step.ratio <= 1), None)

    @property
    def passed(self) -> bool:
        """Whether steps were taken, the runs stayed together to the end, and every native step is as precise as torch's."""
        return bool(self.drift) and self.first is None and self.imprecise is None

    def raise_for_divergence(self) -> None:
        """Raise what parts, if anything does.

        Raises:
            DivergenceError: the runs part.
        """
        if not self.passed:
            raise DivergenceError(str(self))

    def __str__(self) -> str:
        from parity.report.training import training_text

        return training_text(self)

    def to_dict(self) -> dict[str, Any]:
        """The result for machines."""
        from parity.report.data import document

        return document("training", self)
