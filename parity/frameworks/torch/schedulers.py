"""Schedulers of torch: their formulas, or their values step by step as torch computes them."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import LRScheduler

from parity.errors import InputError
from parity.frameworks.torch.optimizers import plain
from parity.training import schedules
from parity.training.schedules import Moved, Schedule

# Steps over which a formula is held against torch's own run, behind the last milestone.
REHEARSED, LONGEST = 64, 10_000


def owns(value: Any) -> bool:
    # ReduceLROnPlateau and ChainedScheduler among them.
    return isinstance(value, LRScheduler)


def position(scheduler: Any) -> int:
    """How many steps a scheduler has taken."""
    return position(scheduler._schedulers[0]) if not hasattr(scheduler, "last_epoch") else scheduler.last_epoch


def read(scheduler: LRScheduler, steps: int | None = None) -> list[Moved]:
    """For each parameter group, the options that the scheduler moves: `lr`, and `momentum` or `beta1` where it cycles.

    Args:
        scheduler: before its first step or later.
        steps: None for a formula, good for any step; a number for torch's own values for so many
            steps from now, bit for bit, whatever the scheduler does.

    Raises:
        InputError: the scheduler follows a metric, or has no formula, or does not follow it.
    """
    if isinstance(scheduler, torch_schedulers.ReduceLROnPlateau):
        raise InputError(
            "ReduceLROnPlateau sets the rate by a metric that no schedule sees; use optax.contrib.reduce_on_plateau, "
            "which decides otherwise, or change the rate in both loops by hand with optax.inject_hyperparams"
        )
    if steps is not None:
        return [{name: table(scheduler, values) for name, values in moved.items()} for moved in rehearse(scheduler, steps)]
    found = [formulas(scheduler, group) for group in range(len(scheduler.optimizer.param_groups))]
    if any("lr" not in moved for moved in found):
        raise InputError(
            f"{type(scheduler).__name__} has no formula that could be compiled; pass steps=N, the number of its steps "
            "that you need: its values are then taken from a rehearsal"
        )
    check(scheduler, found)
    return found


def table(scheduler: LRScheduler, values: list[float]) -> Schedule:
    return schedules.Table(position(scheduler), tuple(values))


def check(scheduler: LRScheduler, found: list[Moved]) -> None:
    """Hold formulas against torch's own run.

    Raises:
        InputError: the scheduler does not follow them, because its rates were changed by hand, say.
    """
    start = position(scheduler)
    last = max((end for form in found for end in milestones(form["lr"])), default=0)
    steps = REHEARSED if last > LONGEST else max(last - start, 0) + REHEARSED
    for number, (moved, forms) in enumerate(zip(rehearse(scheduler, steps), found, strict=True)):
        for name, form in forms.items():
            expected = np.array(moved[name]) if name in moved else np.full(steps, plain_option(scheduler, number, name))
            actual = form.at(np.arange(start, start + len(expected)))
            wrong = ~(np.abs(actual - expected) <= 1e-9 * np.abs(expected).max())
            if wrong.any():
                step = int(np.argmax(wrong))
                raise InputError(
                    f"{type(scheduler).__name__} does not follow its formula: after {start + step} steps {name} of group "
                    f"{number} is {expected[step]:g}, by the formula {actual[step]:g}; if it was changed by hand, pass "
                    "steps=N for the values that torch will really use"
                )


def milestones(schedule: Schedule) -> Iterator[int]:
    if isinstance(schedule, schedules.Sequence):
        yield from schedule.milestones
        for part in schedule.schedules:
            yield from milestones(part)


def plain_option(scheduler: LRScheduler, group: int, name: str) -> float:
    return options(scheduler.optimizer.param_groups[group])[name]


def options(group: dict[str, Any]) -> dict[str, float]:
    """What a scheduler may move."""
    found = {"lr": float(plain(group["lr"]))}
    if "betas" in group:
        found["beta1"] = float(plain(group["betas"][0]))
    if "momentum" in group:
        found["momentum"] = float(group["momentum"])
    return found


def rehearse(scheduler: LRScheduler, steps: int) -> list[dict[str, list[float]]]:
    """The values that torch will use in this and the coming steps; the scheduler itself stays where it is.

    Options other than the rate are left out where they do not move.
    """
    groups = [{name: value for name, value in group.items() if name != "params"} for group in scheduler.optimizer.param_groups]
    stage = SimpleNamespace(
        param_groups=copy.deepcopy(groups), defaults=scheduler.optimizer.defaults, step=stepped, _opt_called=True
    )
    actor = copy.deepcopy(scheduler, {id(scheduler.optimizer): stage})
    found = [{name: [value] for name, value in options(group).items()} for group in stage.param_groups]
    for _ in range(steps - 1):
        try:
            actor.step()
        except ValueError as error:
            if "total steps" not in str(error):
                raise
            # OneCycleLR refuses to go on; so does its table.
            break
        for values, group in zip(found, stage.param_groups, strict=True):
            for name, value in options(group).items():
                values[name].append(value)
    return [{name: v for name, v in values.items() if name == "lr" or len(set(v)) > 1} for values in found]


def stepped() -> None:
    """Stands for an optimizer's step: a scheduler looks whether it was wrapped."""


stepped._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def formulas(scheduler: Any, group: int) -> Moved:
    """The options of a group that a scheduler moves; empty if it has no formula."""
    name = type(scheduler).__name__
    if vars(torch_schedulers).get(name) is not type(scheduler):
        return {}
    if name in ("OneCycleLR", "CyclicLR"):
        return cycles(scheduler, group)
    if name == "SequentialLR":
        parts = [formulas(part, group) for part in scheduler._schedulers]
        if any(set(part) != {"lr"} for part in parts):
            return {}
        return {"lr": schedules.Sequence(tuple(part["lr"] for part in parts), tuple(scheduler._milestones))}
    if name == "ChainedScheduler":
        return chained(scheduler, group)
    made = FORMULAS[name](scheduler, float(plain(scheduler.base_lrs[group]))) if name in FORMULAS else None
    return {"lr": made} if made else {}


def chained(scheduler: Any, group: int) -> Moved:
    """A product, if every part multiplies the rate that it finds; others overwrite it, in an order of their own."""
    parts = [formulas(part, group).get("lr") for part in scheduler._schedulers]
    if not all(isinstance(part, FACTORS) for part in parts):
        return {}
    factors = tuple(cast(Schedule, replace(part, base=1.0)) for part in cast(list[Any], parts))
    return {"lr": schedules.Product(float(plain(scheduler.optimizer.param_groups[group]["initial_lr"])), factors)}


FACTORS = (
    schedules.StepLR,
    schedules.MultiStepLR,
    schedules.ConstantLR,
    schedules.LinearLR,
    schedules.ExponentialLR,
    schedules.PolynomialLR,
)


def step_lr(s: Any, base: float) -> Schedule | None:
    return schedules.StepLR(base, s.gamma, s.step_size) if s.gamma > 0 else None


def multi_step_lr(s: Any, base: float) -> Schedule | None:
    return schedules.MultiStepLR(base, s.gamma, tuple(sorted(s.milestones.elements()))) if s.gamma > 0 else None


def exponential_lr(s: Any, base: float) -> Schedule | None:
    return schedules.ExponentialLR(base, s.gamma) if s.gamma > 0 else None


FORMULAS: dict[str, Callable[[Any, float], Schedule | None]] = {
    "StepLR": step_lr,
    "MultiStepLR": multi_step_lr,
    "ExponentialLR": exponential_lr,
    "ConstantLR": lambda s, base: schedules.ConstantLR(base, s.factor, s.total_iters),
    "LinearLR": lambda s, base: schedules.LinearLR(base, s.start_factor, s.end_factor, s.total_iters),
    "PolynomialLR": lambda s, base: schedules.PolynomialLR(base, s.power, s.total_iters),
    "CosineAnnealingLR": lambda s, base: schedules.CosineAnnealingLR(base, s.eta_min, s.T_max),
    "CosineAnnealingWarmRestarts": lambda s, base: schedules.CosineAnnealingWarmRestarts(base, s.eta_min, s.T_0, s.T_mult),
}


def cycles(scheduler: Any, group: int) -> Moved:
    """OneCycleLR and CyclicLR, which move the momentum against the rate."""
    moves = "beta1" if scheduler.cycle_momentum and scheduler.use_beta1 else "momentum"
    options = scheduler.optimizer.param_groups[group]
    if type(scheduler).__name__ == "OneCycleLR":
        phases = scheduler._schedule_phases
        ends = tuple(float(phase["end_step"]) for phase in phases)
        cosine = scheduler._anneal_func_type == "cos"

        def over(first: str, last: str) -> Schedule:
            names = [phases[0][first], *(phase[last] for phase in phases)]
            return schedules.OneCycleLR(tuple(options[n] for n in names), ends, cosine, scheduler.total_steps)

        found = {"lr": over("start_lr", "end_lr")}
        return found | ({moves: over("start_momentum", "end_momentum")} if scheduler.cycle_momentum else {})
    if scheduler._scale_fn_custom is not None or (scheduler.mode == "exp_range" and scheduler.gamma <= 0):
        return {}
    up = scheduler.total_size * scheduler.step_ratio
    shape = (up, scheduler.total_size - up, scheduler.mode, scheduler.gamma)
    found = {"lr": schedules.CyclicLR(float(plain(scheduler.base_lrs[group])), scheduler.max_lrs[group], *shape)}
    if scheduler.cycle_momentum:
        high, low = scheduler.max_momentums[group], scheduler.base_momentums[group]
        found[moves] = schedules.CyclicLR(high, low, *shape)
    return found


def advance(scheduler: Any, steps: int) -> None:
    """Take steps until a scheduler has taken so many.

    Raises:
        InputError: it has taken more.
    """
    if position(scheduler) > steps:
        raise InputError(f"the scheduler has taken {position(scheduler)} steps and the run {steps}; give one that is made anew")
    # Otherwise torch warns that no optimizer has stepped, as it has not: in the other framework one has.
    scheduler.optimizer._opt_called = True
    while position(scheduler) < steps:
        scheduler.step()
