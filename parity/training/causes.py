"""Why an optimizer takes other steps: what ports get wrong, each tried on the gradients that the port itself had.

Flax's own gradients go into torch's optimizer as it would be with the fault. Where the parameters that come
out are Flax's, step by step, the fault is a cause; that the two models have other gradients by then does not matter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parity.evidence.faults import Cause
from parity.training.optimizers import Group
from parity.training.ports import STEPS, Port, Taken, at, trajectory

TINY = float(np.finfo(np.float64).tiny)
# Causes that are told.
TOLD = 4

# What optax and torch take unless they are told, and what papers take.
DECAYS = {
    0.0: "none",
    1e-4: "the default of optax.adamw",
    1e-2: "the default of torch.optim.AdamW",
    5e-4: "",
    1e-3: "",
    0.1: "",
}
EPSILONS = {
    0.0: "none: forgotten",
    1e-30: "none: forgotten",
    1e-8: "the default of Adam",
    1e-10: "that of Adagrad in torch",
    1e-7: "that of Keras and of Adagrad in optax",
}
EPSILONS |= {1e-6: "", 1e-9: "", 1e-5: "", 1e-3: ""}
BETAS = ((0.9, 0.999), (0.9, 0.98), (0.9, 0.95), (0.9, 0.99), (0.95, 0.999), (0.0, 0.999))


@dataclass(frozen=True)
class Observed:
    """A run of Flax whose parameters part from torch's although its gradients did not.

    Attributes:
        port: torch's optimizer.
        start: parameters before the first step.
        steps: that Flax took: its gradients, and its parameters behind them.
        allowed: largest difference, as a part of an array's largest value.
        batches: that were accumulated for each step.
    """

    port: Port
    start: Mapping[str, np.ndarray]
    steps: tuple[Taken, ...]
    allowed: float
    batches: int = 1

    def apart(self, port: Port) -> dict[str, float]:
        """How far a port's parameters are from Flax's, over what is allowed, by parameter."""
        found = dict.fromkeys(self.start, 0.0)
        for values, step in zip(trajectory(port, self.start, self.steps), self.steps, strict=True):
            for name, theirs in step.values.items():
                scale = max(float(np.nanmax(np.abs(theirs), initial=0.0)), TINY)
                with np.errstate(invalid="ignore"):
                    apart = np.where(np.isnan(values[name]) & np.isnan(theirs), 0.0, np.abs(values[name] - theirs))
                gap = float(apart.max(initial=0.0)) / scale / self.allowed
                found[name] = max(found[name], gap if np.isfinite(gap) else np.inf)
        return found


# What a port may have done, what to change, and torch's optimizer with that.
Variant = tuple[str, str, Port]


@dataclass(frozen=True)
class TrainingHypothesis:
    """One way in which the training of a port goes wrong.

    Attributes:
        name: in reports.
        variants: what torch's optimizer would be with that fault; none if it does not apply.
    """

    name: str
    variants: Callable[[Observed], Iterable[Variant]]


def changed(port: Port, **options: Any) -> Port:
    """A port whose groups have other options."""
    return replace(port, groups=tuple(replace(g, options={**g.options, **options}) for g in port.groups))


def quirk(port: Port, name: str) -> Port:
    return replace(port, quirks=port.quirks | {name})


def first(port: Port, name: str) -> Any:
    """The first group's option before the first step."""
    return at(port.groups[0], port.begun).get(name)


def has(port: Port, name: str) -> bool:
    return any(at(group, port.begun).get(name) for group in port.groups)


def takes(port: Port, name: str) -> bool:
    return all(name in group.options for group in port.groups)


def coupling(seen: Observed) -> Iterator[Variant]:
    """Weight decay added to the gradient where torch takes it off the parameter, or the other way round."""
    if has(seen.port, "weight_decay"):
        decoupled = any(seen.port.is_decoupled(group) for group in seen.port.groups)
        is_now, change = ("coupled", "decoupled") if decoupled else ("decoupled", "coupled")
        where = {
            "coupled": "added to the gradient, before the moments",
            "decoupled": "taken from the parameter itself, beside the moments",
        }
        place = "behind" if decoupled else "before"
        yield (
            f"The weight decay is {is_now}: {where[is_now]}",
            f"put optax.add_decayed_weights {place} what computes the moments: torch's is {change}",
            replace(seen.port, decoupled=not decoupled),
        )
        if decoupled:
            yield (
                "The decoupled weight decay is not multiplied by the learning rate",
                "put optax.add_decayed_weights before what multiplies by the learning rate",
                quirk(seen.port, "decay without the rate"),
            )


def decay(seen: Observed) -> Iterator[Variant]:
    """Another weight decay."""
    if not takes(seen.port, "weight_decay"):
        return
    now = [group.options["weight_decay"] for group in seen.port.groups]
    told = ", ".join(dict.fromkeys(f"{value:g}" for value in now))
    for value, known in DECAYS.items():
        if any(value != one for one in now):
            name = f", {known}" if known and value else ""
            what = f"The weight decay is {value:g}{name}" if value else "There is no weight decay"
            yield what, f"weight_decay={told}, as torch has it", changed(seen.port, weight_decay=value)
    if len(set(now)) > 1:
        for value in dict.fromkeys(now):
            yield (
                f"Every parameter is decayed by {value:g}, where torch's groups have {told}",
                "give the decay a mask, or take parity.to_optax(optimizer, torch_model, flax_model)",
                changed(seen.port, weight_decay=value),
            )


def unused(seen: Observed) -> Iterator[Variant]:
    """A parameter without a gradient that is moved all the same."""
    if seen.port.unused:
        names = ", ".join(sorted(seen.port.unused))
        yield (
            f"{names} without a gradient is moved by the weight decay: JAX has a gradient of 0 where torch has none",
            f"parity.to_optax(..., unused={sorted(seen.port.unused)!r}), or a mask",
            replace(seen.port, unused=frozenset()),
        )


def groups(seen: Observed) -> Iterator[Variant]:
    """The options of one parameter group taken for all."""
    for number, group in enumerate(seen.port.groups if len(seen.port.groups) > 1 else ()):
        alike = tuple(replace(other, options=group.options) for other in seen.port.groups)
        yield (
            f"Every parameter has the options of torch's group {number}",
            "optax.multi_transform by group, as parity.to_optax(optimizer, torch_model, flax_model) makes it",
            replace(seen.port, groups=alike),
        )


def eps_place(seen: Observed) -> Iterator[Variant]:
    """The epsilon inside the root where torch has it outside, or the other way round."""
    if takes(seen.port, "eps") and seen.port.kind in ("Adam", "AdamW", "NAdam", "RMSprop", "Adagrad"):
        eps = first(seen.port, "eps")
        inside = "eps_in_sqrt=False" if seen.port.kind == "RMSprop" else f"eps={eps:g} and eps_root=0"
        yield (
            f"eps={eps:g} is added inside the root",
            f"{inside}: torch adds eps to the root",
            quirk(seen.port, "eps in the root"),
        )
        yield (
            f"eps={eps:g} is added inside the root and beside it",
            f"{inside}: torch adds eps to the root alone",
            quirk(seen.port, "eps in the root and beside it"),
        )


def eps(seen: Observed) -> Iterator[Variant]:
    """Another small number under or beside the root."""
    if takes(seen.port, "eps"):
        now = first(seen.port, "eps")
        for value, known in EPSILONS.items():
            if value != now:
                text = f"eps is {value:g}" + (f", {known}" if known else "") if value > 1e-20 else "eps is forgotten"
                yield text, f"eps={now:g}, as torch has it", changed(seen.port, eps=value)
                if value and "eps in the root" not in seen.port.quirks and seen.port.kind in ("RMSprop", "Adagrad"):
                    yield (
                        f"{text}, inside the root",
                        f"eps={now:g} beside the root",
                        quirk(changed(seen.port, eps=value), "eps in the root"),
                    )


def bias_correction(seen: Observed) -> Iterator[Variant]:
    """Moments that are not divided by what they lack in the first steps."""
    if seen.port.kind in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax"):
        for name in ("no bias correction", *(f"no bias correction of the {n} moment" for n in ("first", "second"))):
            yield (
                f"There is {name}",
                "divide the moments by 1 - beta^t, as optax.scale_by_adam does",
                quirk(seen.port, name),
            )


def betas(seen: Observed) -> Iterator[Variant]:
    """Moments that forget faster or slower."""
    if not takes(seen.port, "beta1"):
        return
    one, two = first(seen.port, "beta1"), first(seen.port, "beta2")
    change = f"b1={one:g}, b2={two:g}"
    yield "The betas are exchanged", change, changed(seen.port, beta1=two, beta2=one)
    for left, right in BETAS:
        if (left, right) != (one, two):
            yield f"The betas are {left:g} and {right:g}", change, changed(seen.port, beta1=left, beta2=right)


def momentum(seen: Observed) -> Iterator[Variant]:
    """Another momentum, or another kind of it."""
    if seen.port.kind not in ("SGD", "RMSprop"):
        return
    now, damp = first(seen.port, "momentum") or 0.0, first(seen.port, "dampening") or 0.0
    if now:
        yield (
            f"The momentum is {1 - now:g}: the share that is forgotten, not the one that is kept",
            f"decay={now:g} in optax.trace",
            changed(seen.port, momentum=1 - now),
        )
        yield (
            "The momentum is taken behind the learning rate, so that it remembers the rates of earlier steps",
            "put optax.trace before what multiplies by the learning rate",
            quirk(seen.port, "momentum behind the rate"),
        )
    if seen.port.kind == "SGD" and now:
        for value in dict.fromkeys((damp, 0.0, now, 1 - now)):
            if value != damp:
                yield (
                    f"The dampening is {value:g}: gradients go into the buffer times {1 - value:g}",
                    f"torch's dampening is {damp:g}: parity.to_optax builds it, optax.trace knows none",
                    changed(seen.port, dampening=value),
                )
            yield (
                "The first gradient is damped too" + (f", with a dampening of {value:g}" if value != damp else ""),
                "torch's buffer begins with the whole first gradient: parity.to_optax builds it",
                quirk(changed(seen.port, dampening=value), "first gradient damped"),
            )
        nesterov = bool(first(seen.port, "nesterov"))
        yield (
            "Nesterov's momentum is " + ("left out" if nesterov else "taken"),
            f"nesterov={nesterov} in optax.trace",
            changed(seen.port, nesterov=not nesterov),
        )
    for value in (0.0, 0.9, 0.99, 0.95, 0.5):
        if value != now:
            yield f"The momentum is {value:g}", f"momentum={now:g}", changed(seen.port, momentum=value, dampening=damp)


def moving_average(seen: Observed) -> Iterator[Variant]:
    """Squares of gradients that are forgotten faster or slower."""
    for name in ("alpha", "rho"):
        if takes(seen.port, name):
            now = first(seen.port, name)
            for value in dict.fromkeys((1 - now, 0.9, 0.99, 0.95, 0.999)):
                if value != now:
                    text = f"The decay of the squares is {value:g}" + (", the default of optax.rmsprop" if value == 0.9 else "")
                    yield text, f"decay={now:g}, torch's {name}", changed(seen.port, **{name: value})


def amsgrad(seen: Observed) -> Iterator[Variant]:
    """The largest second moment so far kept, or not."""
    if takes(seen.port, "amsgrad"):
        on = bool(first(seen.port, "amsgrad"))
        change = "parity.to_optax, which keeps the largest second moment before its correction" if on else "optax.adam"
        yield f"amsgrad is {'left out' if on else 'on'}", change, changed(seen.port, amsgrad=not on)
        if on:
            late = quirk(seen.port, "largest moment behind its correction")
            yield "The largest second moment is kept behind its bias correction, as optax.amsgrad does", change, late


def sums(seen: Observed) -> Iterator[Variant]:
    """The sum of squares begun at another number."""
    if seen.port.kind == "Adagrad":
        for value in (0.1, 1.0):
            for inside in ("", ", and eps inside the root"):
                port = replace(changed(seen.port, initial_accumulator_value=value), state={})
                port = quirk(changed(port, eps=1e-7), "eps in the root") if inside else port
                yield (
                    f"The sums of squares begin at {value:g}{', as in optax.adagrad' if value == 0.1 else ''}{inside}",
                    "initial_accumulator_value=0, as torch has it; parity.to_optax builds the rest",
                    port,
                )


def sign(seen: Observed) -> Iterator[Variant]:
    """Steps up the gradient."""
    up = has(seen.port, "maximize")
    text = "The loss is made smaller" if up else "The loss is made larger"
    yield text, f"maximize={up}, as torch has it", changed(seen.port, maximize=not up)


def clipping(seen: Observed) -> Iterator[Variant]:
    """Gradients clipped otherwise, or not."""
    port = seen.port
    bound = port.norm if port.norm is not None else port.value
    if bound is None:
        for value in (1.0, 0.5, 5.0):
            yield f"Gradients are clipped to a norm of {value:g}", "torch clips nothing", replace(port, norm=value)
        return
    change = f"parity.clip_grad_{'norm' if port.norm is not None else 'value'}({bound:g}) before the transformation"
    yield "Gradients are not clipped", change, replace(port, norm=None, value=None)
    if port.norm is not None:
        yield f"Gradients are clipped by value, to {bound:g}, not by their norm", change, replace(port, norm=None, value=bound)
        yield (
            "The norm is divided by without torch's 1e-6, as in optax.clip_by_global_norm",
            change,
            replace(port, spare=0.0),
        )
    else:
        yield f"Gradients are clipped by their norm, to {bound:g}, not by value", change, replace(port, norm=bound, value=None)


def accumulation(seen: Observed) -> Iterator[Variant]:
    """Gradients of several batches summed where torch takes their mean, or the other way round."""
    if seen.batches > 1:
        for factor, text in ((float(seen.batches), "summed, not averaged"), (1 / seen.batches, "divided twice")):
            yield (
                f"Gradients of {seen.batches} batches are {text}",
                "divide the loss of each by their number once, or take optax.MultiSteps",
                replace(seen.port, factor=factor),
            )


def shifted(seen: Observed) -> Iterator[Variant]:
    """The learning rate of another step: the schedule is a step early or late."""
    if not any(hasattr(v, "at") for group in seen.port.groups for v in group.options.values()):
        return
    change = "call the schedule with the number of updates before this one, 0 in the first, as optax does by itself"
    for steps in (1, -1):
        side = "ahead" if steps > 0 else "behind"
        yield f"The schedule is one step {side}", change, replace(seen.port, shift=steps)
    still = tuple(replace(g, options=at(g, seen.port.begun)) for g in seen.port.groups)
    yield "The learning rate stays as it is in the first step", "give optax the schedule", replace(seen.port, groups=still)
    if seen.port.begun:
        fresh = replace(seen.port, begun=0)
        yield "The schedule begins anew on resume", "carry the count over: parity.transfer_optimizer does", fresh


def resumed(seen: Observed) -> Iterator[Variant]:
    """A run that goes on without the count or the moments that torch has."""
    port = seen.port
    steps = max((int(entry.get("step", 0)) for entry in port.state.values()), default=0)
    # Adagrad has a state before its first step.
    if not port.state or (not steps and port.kind not in ("SGD", "RMSprop", "Adadelta")):
        return
    carry = "parity.transfer_optimizer(optimizer, state, torch_model, flax_model) carries moments and counts"
    unset = {name: {**entry, "step": 0} for name, entry in port.state.items()}
    if steps:
        for begun in dict.fromkeys((0, port.begun)):
            text = " and that of the schedule" if port.begun and begun == 0 else ""
            yield (
                f"The step count{text} begins anew on resume, where torch has taken {steps} steps",
                carry,
                replace(port, state=unset, begun=begun),
            )
    for begun in dict.fromkeys((port.begun, 0)):
        text = ", and the schedule too" if port.begun and begun == 0 else ""
        what = f"Moments and step count begin anew on resume{text}"
        yield what, carry, replace(port, state={}, begun=begun)
    kept = {name: {"step": entry.get("step", 0)} for name, entry in port.state.items()}
    yield "Moments begin anew on resume, the step count goes on", carry, replace(port, state=kept)


def rate(seen: Observed) -> Iterator[Variant]:
    """The rate that the first step shows, if it shows one."""
    taken = trajectory(seen.port, seen.start, seen.steps[:1])[0]
    mine = np.concatenate([(taken[n] - seen.start[n]).ravel() for n in seen.steps[0].values])
    theirs = np.concatenate([(a - seen.start[n]).ravel() for n, a in seen.steps[0].values.items()])
    if not (mine @ mine) > 0 or not np.isfinite(mine).all() or not np.isfinite(theirs).all():
        return
    factor = float(mine @ theirs / (mine @ mine))
    lr = first(seen.port, "lr")
    scheduled = any(hasattr(group.options["lr"], "at") for group in seen.port.groups)
    for value in dict.fromkeys((float(f"{factor:.3g}"), factor)):
        if value > 0 and value != 1:
            text = f"{value:.6g} times torch's" if scheduled or len(seen.port.groups) > 1 else f"{lr * value:.6g}"
            yield (
                f"The learning rate is {text}",
                f"learning_rate={lr:g}" if not scheduled else "torch's schedule",
                scaled(seen.port, value),
            )


def scaled(port: Port, factor: float) -> Port:
    return replace(port, groups=tuple(Group(g.names, {**g.options, "lr": Times(g.options["lr"], factor)}) for g in port.groups))


@dataclass(frozen=True)
class Times:
    """A rate times a number."""

    form: Any
    factor: float

    def at(self, t: Any, xp: Any = np) -> Any:
        """The value after t steps."""
        return self.factor * (self.form.at(t, xp) if hasattr(self.form, "at") else self.form)


def family(seen: Observed) -> Iterator[Variant]:
    """The steps of another optimizer."""
    for kind in STEPS:
        alike = {seen.port.kind, kind} == {"Adam", "AdamW"} and not has(seen.port, "weight_decay")
        if kind != seen.port.kind and not alike:
            known = {"eps": 1e-8, "beta1": 0.9, "beta2": 0.999, "alpha": 0.99, "rho": 0.9, "momentum": 0.0}
            options = tuple(replace(g, options={**known, **g.options}) for g in seen.port.groups)
            what = f"The optimizer is {kind}, with torch's defaults for what {seen.port.kind} does not have"
            yield what, f"the twin of {seen.port.kind}: parity.to_optax", replace(seen.port, kind=kind, groups=options)


# In the order in which causes that fit equally well are told: the simplest and likeliest first.
HYPOTHESES = (
    # A shift of an exponential schedule is a factor of the rate.
    TrainingHypothesis("schedule", shifted),
    TrainingHypothesis("learning rate", rate),
    TrainingHypothesis("resume", resumed),
    TrainingHypothesis("weight decay", decay),
    TrainingHypothesis("coupled weight decay", coupling),
    TrainingHypothesis("unused parameters", unused),
    TrainingHypothesis("parameter groups", groups),
    TrainingHypothesis("place of epsilon", eps_place),
    TrainingHypothesis("epsilon", eps),
    TrainingHypothesis("bias correction", bias_correction),
    TrainingHypothesis("betas", betas),
    TrainingHypothesis("momentum", momentum),
    TrainingHypothesis("moving average", moving_average),
    TrainingHypothesis("amsgrad", amsgrad),
    TrainingHypothesis("sum of squares", sums),
    TrainingHypothesis("sign", sign),
    TrainingHypothesis("gradient clipping", clipping),
    TrainingHypothesis("gradient accumulation", accumulation),
    TrainingHypothesis("another optimizer", family),
)


def explained(seen: Observed) -> tuple[Cause, ...]:
    """What makes Flax's steps out of Flax's gradients, where torch's optimizer as it is does not: the simplest first."""
    before = seen.apart(seen.port)
    worst = max(before.values(), default=0.0)
    if not worst > 1:
        return ()
    wrong = tuple(name for name, gap in before.items() if not gap <= 1)
    singles = list(tried(seen, before, wrong))
    found = [cause for _, cause in singles if cause.complete]
    if not found:
        helpful = sorted((p for p in singles if p[1].after < worst), key=lambda p: p[1].after)[:12]
        pairs = [c for port, cause in helpful for c in on_top(replace(seen, port=port), cause, before, wrong)]
        found = list({frozenset(cause.what.split("; and ")): cause for cause in reversed(pairs)}.values())[::-1]
    return tuple(found[:TOLD])


def tried(seen: Observed, before: Mapping[str, float], wrong: tuple[str, ...]) -> Iterator[tuple[Port, Cause]]:
    """Every fault alone, with what is left of the difference."""
    for hypothesis in HYPOTHESES:
        for what, change, port in hypothesis.variants(seen):
            after = seen.apart(port)
            left = max(after.values())
            gone = tuple(name for name in wrong if after[name] <= 1)
            yield port, Cause(*(hypothesis.name, "the optimizer", what, change, max(before.values()), left), gone, left <= 1)


def on_top(seen: Observed, base: Cause, before: Mapping[str, float], wrong: tuple[str, ...]) -> Iterator[Cause]:
    """Two faults at once: every hypothesis on top of one that helps."""
    for _, cause in tried(seen, before, wrong):
        if cause.complete and cause.hypothesis != base.hypothesis:
            yield replace(
                cause,
                hypothesis=f"{base.hypothesis} and {cause.hypothesis}",
                what=f"{base.what}; and {cause.what}",
                change=f"{base.change}; and {cause.change}",
            )
