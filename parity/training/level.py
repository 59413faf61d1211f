"""The highest level of the ladder: training stays the same."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from parity.errors import InputError, first_line
from parity.evidence.result import Finding, LevelResult
from parity.report.training import first_lines, headline
from parity.said import Said
from parity.training.outcome import Training
from parity.training.recipe import Recipe, checked_loss
from parity.training.steps import ALLOWED, Twins, checked_batches, chunks

# Steps for which there is memory: each keeps its batches and a row of the report.
MOST = 1_000_000


@dataclass(frozen=True)
class Plan:
    """How the two models of a comparison are trained.

    Attributes:
        steps: how many.
        twins: the two, with optimizer, loss and recipe.
        batches: the batches of each step.
        allowed: largest difference, as a part of an array's largest value.
    """

    steps: int
    twins: Twins
    batches: tuple[Any, ...]
    allowed: float = ALLOWED


def planned(
    torch_model: Any,
    flax_model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    steps: int,
    optimizer: Any,
    loss: Any,
    batches: Iterable[Sequence[Any]] | None,
    recipe: Recipe | None,
    rename: Mapping[str, str] | None,
    ignore: Iterable[str],
) -> Plan | None:
    """What `parity.compare` was asked to train; None if it was not.

    Raises:
        InputError: something is missing, or does not fit.
    """
    given = {"optimizer": optimizer, "loss": loss, "batches": batches, "recipe": recipe}
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise InputError(f"steps must be a whole number of at least 0, got {steps!r}")
    if steps > MOST:
        raise InputError(
            f"steps must be at most {MOST:,}, got {steps:,}: every step is kept for the report; two right runs show "
            "themselves in twenty"
        )
    if not steps:
        idle = [name for name, value in given.items() if value is not None]
        if idle:
            raise InputError(f"{', '.join(idle)} without steps does nothing; pass steps=N too")
        return None
    missing = [name for name in ("optimizer", "loss") if given[name] is None]
    if missing:
        raise InputError(
            f"steps={steps} needs {' and '.join(missing)} too, as in steps=20, optimizer=torch.optim.AdamW, loss='mse'"
        )
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InputError(f"recipe must be a parity.Recipe, got {recipe!r}")
    # The models were given in eval mode, as all other levels want them.
    recipe = recipe or Recipe()
    recipe = replace(recipe, train=True) if recipe.train is None else recipe
    known = checked_batches([(*args, dict(kwargs)) if kwargs else tuple(args)] if batches is None else batches)
    if not known:
        raise InputError("batches is empty: there is nothing to train on")
    twins = Twins(torch_model, flax_model, optimizer, checked_loss(loss), recipe, rename, ignore)
    taken = islice(cycle(known), steps * recipe.accumulate)
    return Plan(steps, twins, tuple(chunks(taken, recipe.accumulate)))


def training(plan: Plan) -> tuple[LevelResult, Training | None]:
    """Both models trained, in float64 and natively, as a level of the ladder."""
    steps = list(plan.batches)
    try:
        found = plan.twins.whole(steps, plan.allowed, native=True)
    except InputError as error:
        return LevelResult("training", "not run", first_line(error)), None
    figures = {
        "steps": len(found.drift),
        "loss": found.drift[-1].loss if found.drift else None,
        "loss_difference": max((abs(drift.loss_difference) for drift in found.drift), default=0.0),
        "gradients": max((drift.gradients for drift in found.drift), default=0.0),
        "values": max((drift.values for drift in found.drift), default=0.0),
        "buffers": max((drift.buffers for drift in found.drift), default=0.0),
        "skipped": sum(drift.skipped for drift in found.drift),
        "native_ratio": max((step.ratio for step in found.native), default=0.0),
    }
    notes = [*found.notes]
    if found.noise:
        text = f"gradient is rounding alone, not compared: {', '.join(n for n, _ in found.noise)}"
        notes.append(Said("rounding-gradient", text))
    if found.unused:
        notes.append(Said("without-gradient", f"without gradient, left alone: {', '.join(found.unused)}"))
    if found.passed:
        return LevelResult("training", "passed", headline(found), figures, notes=tuple(notes)), found
    return LevelResult(
        "training", "failed", f"they part in step {plan_step(found)}", figures, findings(found), tuple(notes)
    ), found


def plan_step(found: Training) -> int | None:
    """The first step that shows a difference, in float64 or natively."""
    if found.first is not None:
        return found.first
    return found.imprecise.step if found.imprecise is not None else None


def findings(found: Training) -> tuple[Finding, ...]:
    """What parts first, and why."""
    if found.dropout:
        return (Finding("dropout", found.dropout, {"step": found.first}),)
    what = ". ".join(line.strip() for line in first_lines(found))
    figures = {"step": plan_step(found), "parted": list(found.parted)}
    causes = [Finding("cause", f"{c.hypothesis}. {c.what}; change: {c.change}", {"left": c.after}) for c in found.causes]
    return (Finding("", what, figures), *causes)
