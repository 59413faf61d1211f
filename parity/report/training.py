"""The outcome of training both models, in words."""

from math import isfinite
from typing import TYPE_CHECKING

from parity.report.text import cause_lines

if TYPE_CHECKING:
    from parity.training.outcome import Drift, NativeStep, Training

FURTHER = "  the models differ, or what an earlier step did to them: see parity.compare(...)"
# Rows of the drift that are shown: the first, then ever fewer, and the last.
SHOWN = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)


def training_text(training: "Training") -> str:
    """The verdict, what parts first and why, and the drift."""
    if training.dropout:
        return "\n".join(["NOT the same training", "", f"step {training.first}: dropout is not torch's", training.dropout])
    if not training.drift:
        return "no step was taken"
    if training.passed:
        lines = [f"the same training: {headline(training)}"]
    else:
        lines = ["NOT the same training", "", *first_lines(training), *cause_lines(training.causes)]
    lines += ["", *rows(training)]
    if training.noise:
        names = ", ".join(f"{name} ({count})" for name, count in training.noise)
        lines += ["", f"gradient is rounding alone, not compared: {names}"]
    if training.unused:
        lines += ["", f"without gradient, left alone: {', '.join(training.unused)}"]
    return "\n".join([*lines, *(f"note: {note}" for note in training.notes)])


def headline(training: "Training") -> str:
    """The figures of a run that passed, in one line."""
    steps = len(training.drift)
    largest = max(training.drift, key=lambda drift: drift.values)
    skipped = sum(drift.skipped for drift in training.drift)
    text = (
        f"{steps} steps in float64, largest difference {largest.values:.2g} of {largest.worst} "
        f"(allowed {training.allowed:.0e}, {training.mode})"
    )
    if training.native:
        worst = max(step.ratio for step in training.native)
        text += f"; natively from torch's state each, error {worst:.2g} times the allowed"
    return text + (f"; {skipped} skipped by the loss scale" if skipped else "")


def first_lines(training: "Training") -> list[str]:
    """The first step that shows a difference, and which half of it is to blame."""
    if training.first is None:
        return native_lines(training.imprecise)
    drift = training.drift[training.first - 1]
    others = f" and {len(training.parted) - 1} more" if len(training.parted) > 1 else ""
    allowed = f"(allowed {training.allowed:.0e})"
    if isfinite(drift.loss) != isfinite(drift.flax_loss):
        return [f"step {drift.step}: the loss is {drift.loss:.6g} in torch and {drift.flax_loss:.6g} in Flax", FURTHER]
    if drift.gradients <= training.allowed:
        return [
            f"step {drift.step}: {training.parted[0]}{others} part, by {drift.values:.2g} of the largest value {allowed}",
            f"  gradients before it agree to {drift.gradients:.2g}: the optimizer or a running statistic takes another step",
        ]
    return [
        f"step {drift.step}: gradients of {training.parted[0]}{others} part, by {drift.gradients:.2g} of the largest {allowed}",
        FURTHER,
    ]


def native_lines(step: "NativeStep | None") -> list[str]:
    """The first step that loses digits in the dtype of the models."""
    if step is None:
        return []
    return [
        f"step {step.step}, in the dtype of the models from torch's state: error of {step.worst} {step.ratio:.3g} times the "
        "allowed",
        "  in float64 the steps agree: digits are lost, or a dtype is not torch's",
    ]


def rows(training: "Training") -> list[str]:
    """The drift as a table."""
    wanted = {*SHOWN, training.first, len(training.drift)}
    shown = [drift for drift in training.drift if drift.step in wanted]
    step, *others = columns()
    heads = [f"{head:>{width}}" for head, width in zip(others, (14, 13, 10, 10))]
    return [" ".join([f"{step:>6}", *heads]), *map(row, shown)]


def columns() -> list[str]:
    """What the drift tells of each step; behind it stands what has the largest difference."""
    return ["step", "loss (torch)", "flax - torch", "gradients", "parameters"]


def row(drift: "Drift") -> str:
    numbers = f"{drift.loss:>14.6g} {drift.loss_difference:>13.1e} {drift.gradients:>10.1e} {drift.values:>10.1e}"
    return f"{drift.step:>6} {numbers}  {drift.worst}{'  skipped' if drift.skipped else ''}"
