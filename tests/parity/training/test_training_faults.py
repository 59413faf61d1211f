"""Faults that ports of optimizers have: each is seen, and named by torch's steps with that fault on the port's gradients."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from torch import nn, optim
from torch.optim import lr_scheduler as lrs
from training_helpers import MAKE, Torch, flax_run, gradients, parted, start, torch_run

import parity
from parity import frameworks
from parity.training.causes import Observed, explained
from parity.training.ports import STEPS, Taken, trajectory
from parity.training.steps import port_of

RATE = 0.05


@dataclass(frozen=True)
class Fault:
    """A port of an optimizer with a fault.

    Attributes:
        make: torch's optimizer.
        port: the transformation with the fault.
        cause: the hypothesis that must name it; '' where none does.
        says: what the cause must say.
        schedule: makes the scheduler of the optimizer.
        max_norm: of clipping, and `max_value`.
        max_value: of clipping.
        batches: that were accumulated.
    """

    make: Callable[..., Any]
    port: Callable[[], Any]
    cause: str = ""
    says: str = ""
    schedule: Callable[[Any], Any] | None = None
    max_norm: float | None = None
    max_value: float | None = None
    batches: int = 1


def torchs(kind: Any, **options: Any) -> Callable[..., Any]:
    return lambda parameters: kind(parameters, lr=RATE, **options)


def adam(*before: Any, behind: tuple[Any, ...] = (), rate: Any = RATE, **options: Any) -> Any:
    return optax.chain(*before, optax.scale_by_adam(**options), *behind, optax.scale_by_learning_rate(rate))


def undebiased() -> Any:
    """Adam whose moments are taken as they are."""

    def update(g: Any, state: Any, params: Any = None) -> Any:
        m, v = (
            jax.tree.map(lambda o, n, b=b: b * o + (1 - b) * n, old, new)
            for b, old, new in zip((0.9, 0.999), state, (g, jax.tree.map(jnp.square, g)), strict=True)
        )
        return jax.tree.map(lambda m, v: -RATE * m / (jnp.sqrt(v) + 1e-8), m, v), (m, v)

    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
    return optax.GradientTransformation(lambda params: (zeros(params), zeros(params)), update)


def falling(shift: int) -> Callable[[Any], Any]:
    return lambda count: RATE * 0.9 ** (count + shift)


ADAM, DECAYED = torchs(optim.Adam), torchs(optim.AdamW, weight_decay=0.1)
MOMENTUM = torchs(optim.SGD, momentum=0.8)
FALL = {"schedule": lambda optimizer: lrs.ExponentialLR(optimizer, 0.9)}
FAULTS = {
    "decay coupled": Fault(DECAYED, lambda: adam(optax.add_decayed_weights(0.1)), "coupled weight decay", "is coupled"),
    "decay decoupled": Fault(
        torchs(optim.Adam, weight_decay=0.1),
        lambda: optax.adamw(RATE, weight_decay=0.1),
        "coupled weight decay",
        "is decoupled",
    ),
    "decay without rate": Fault(
        DECAYED,
        lambda: optax.chain(adam(), optax.add_decayed_weights(-0.1)),
        "coupled weight decay",
        "not multiplied by the learning rate",
    ),
    "decay default": Fault(
        torchs(optim.AdamW), lambda: optax.adamw(RATE), "weight decay", "is 0.0001, the default of optax.adamw"
    ),
    "no decay": Fault(DECAYED, adam, "weight decay", "There is no weight decay"),
    "eps in the root": Fault(ADAM, lambda: adam(eps=0.0, eps_root=1e-8), "place of epsilon", "inside the root"),
    "eps in the root of RMSprop": Fault(
        torchs(optim.RMSprop), lambda: optax.rmsprop(RATE, decay=0.99), "place of epsilon", "inside the root"
    ),
    "eps forgotten": Fault(ADAM, lambda: adam(eps=1e-30), "epsilon", "eps is forgotten"),
    "another eps": Fault(ADAM, lambda: adam(eps=1e-7), "epsilon", "eps is 1e-07"),
    "schedule ahead": Fault(torchs(optim.SGD), lambda: optax.sgd(falling(1)), "schedule", "one step ahead", **FALL),
    "schedule behind": Fault(torchs(optim.SGD), lambda: optax.sgd(falling(-1)), "schedule", "one step behind", **FALL),
    "no schedule": Fault(torchs(optim.SGD), lambda: optax.sgd(RATE), "schedule", "stays as it is", **FALL),
    "no bias correction": Fault(ADAM, undebiased, "bias correction", "no bias correction"),
    "betas exchanged": Fault(ADAM, lambda: adam(b1=0.999, b2=0.9), "betas", "exchanged"),
    "another beta": Fault(ADAM, lambda: adam(b2=0.98), "betas", "0.9 and 0.98"),
    "rate": Fault(ADAM, lambda: adam(rate=0.03), "learning rate", "The learning rate is 0.03"),
    "momentum the other way": Fault(MOMENTUM, lambda: optax.sgd(RATE, momentum=0.2), "momentum", "momentum is 0.2"),
    "no dampening": Fault(
        torchs(optim.SGD, momentum=0.8, dampening=0.3), lambda: optax.sgd(RATE, momentum=0.8), "momentum", "dampening is 0"
    ),
    "first gradient damped": Fault(
        torchs(optim.SGD, momentum=0.8, dampening=0.3),
        lambda: optax.chain(optax.scale(0.7), optax.sgd(RATE, momentum=0.8)),
        "momentum",
        "first gradient is damped too",
    ),
    "nesterov": Fault(
        torchs(optim.SGD, momentum=0.8, nesterov=True), lambda: optax.sgd(RATE, momentum=0.8), "momentum", "left out"
    ),
    "momentum behind the rate": Fault(
        MOMENTUM,
        lambda: optax.chain(optax.scale_by_learning_rate(falling(0)), optax.trace(0.8)),
        "momentum",
        "behind the learning rate",
        **FALL,
    ),
    "alpha of RMSprop": Fault(
        torchs(optim.RMSprop), lambda: optax.rmsprop(RATE, eps_in_sqrt=False), "moving average", "is 0.9, the default"
    ),
    "no amsgrad": Fault(torchs(optim.Adam, amsgrad=True, betas=(0.9, 0.5)), lambda: adam(b2=0.5), "amsgrad", "left out"),
    "amsgrad of optax": Fault(
        torchs(optim.Adam, amsgrad=True, betas=(0.9, 0.5)), lambda: optax.amsgrad(RATE, b2=0.5), "amsgrad", "optax.amsgrad"
    ),
    "adagrad of optax": Fault(
        torchs(optim.Adagrad),
        lambda: optax.adagrad(RATE),
        "sum of squares",
        "begin at 0.1, as in optax.adagrad, and eps inside",
    ),
    "ascent": Fault(torchs(optim.SGD), lambda: optax.sgd(-RATE), "sign", "made larger"),
    "clipped by value": Fault(
        torchs(optim.SGD), lambda: optax.chain(optax.clip(0.5), optax.sgd(RATE)), "gradient clipping", "by value", max_norm=0.5
    ),
    "clipped by norm": Fault(
        torchs(optim.SGD),
        lambda: optax.chain(parity.clip_grad_norm(0.5), optax.sgd(RATE)),
        "gradient clipping",
        "by their norm",
        max_value=0.5,
    ),
    "not clipped": Fault(torchs(optim.SGD), lambda: optax.sgd(RATE), "gradient clipping", "are not clipped", max_norm=0.5),
    "clipped by optax": Fault(
        torchs(optim.SGD),
        lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(RATE)),
        "gradient clipping",
        "without torch's 1e-6",
        max_norm=0.5,
    ),
    "summed batches": Fault(
        torchs(optim.Adam, eps=1e-2), lambda: adam(optax.scale(2.0), eps=1e-2), "gradient accumulation", "summed", batches=2
    ),
    "another optimizer": Fault(torchs(optim.NAdam), adam, "another optimizer", "The optimizer is Adam,"),
    "two faults": Fault(
        torchs(optim.AdamW),
        lambda: optax.adamw(RATE, eps=0.0, eps_root=1e-8),
        "place of epsilon and weight decay",
        "inside the root",
    ),
    # What is seen, but has too much wrong in it to be named.
    "nadam of optax": Fault(torchs(optim.NAdam), lambda: optax.nadam(RATE)),
    "radam of optax": Fault(torchs(optim.RAdam), lambda: optax.radam(RATE)),
    "rprop of optax": Fault(torchs(optim.Rprop), lambda: optax.rprop(RATE)),
}
# The port without the fault, where optax has one.
CLEAN = {
    "decay coupled": lambda: optax.adamw(RATE, weight_decay=0.1),
    "decay decoupled": lambda: adam(optax.add_decayed_weights(0.1)),
    "eps in the root": adam,
    "alpha of RMSprop": lambda: optax.rmsprop(RATE, decay=0.99, eps_in_sqrt=False),
    "schedule ahead": lambda: optax.sgd(falling(0)),
}
STEPS_TAKEN = 6


def observed(fault: Fault, actual: Any, grads: Any, port: Any) -> Observed:
    """What training both models would keep of this run."""
    if port.kind not in STEPS:
        return Observed(port, {}, (), 1e-10)
    flat = {name: array.reshape(STEPS_TAKEN, -1) for name, array in actual.items()}
    steps = []
    for step in range(STEPS_TAKEN):
        here = {name: g[step].reshape(-1) for name, g in grads.items()}
        norm = float(np.sqrt(sum((g**2).sum() for g in here.values())))
        steps.append(Taken(here, norm, {name: array[step] for name, array in flat.items()}))
    return Observed(port, {name: array.reshape(-1) for name, array in start().items()}, tuple(steps), 1e-10, fault.batches)


def torchs_run(fault: Fault, grads: Any) -> tuple[Any, Any]:
    """Torch's parameters after every step, and its optimizer in the words of no framework."""
    model = Torch(start())
    optimizer = fault.make(model.parameters())
    scheduler = fault.schedule(optimizer) if fault.schedule else None
    names = {id(p): name for name, p in model.named_parameters()}
    known = frameworks.load("torch.optimizers")
    port = port_of(optimizer, names, scheduler) if known.read(optimizer, names).kind in STEPS else None
    for bound, clip in ((fault.max_norm, nn.utils.clip_grad_norm_), (fault.max_value, nn.utils.clip_grad_value_)):
        if bound is not None:
            optimizer.register_step_pre_hook(lambda *_, clip=clip, bound=bound: (clip(model.parameters(), bound), None)[1])
    expected = torch_run(optimizer, model, grads, scheduler.step if scheduler else lambda: None)
    return expected, port and replace(port, norm=fault.max_norm, value=fault.max_value)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen_and_named(name):
    fault, grads = FAULTS[name], gradients(STEPS_TAKEN)
    with jax.enable_x64(True):
        expected, port = torchs_run(fault, grads)
        actual, _ = flax_run(fault.port(), start(), grads)
        if name in CLEAN:
            assert parted(flax_run(CLEAN[name](), start(), grads)[0], expected) < 1e-13
    assert parted(actual, expected) > 1e-9
    if not fault.cause:
        return
    seen = observed(fault, actual, grads, port)
    # The third implementation is torch's.
    run = trajectory(port, seen.start, seen.steps)
    assert all(np.abs(values[n] - expected[n][i].reshape(-1)).max() < 1e-12 for i, values in enumerate(run) for n in expected)
    first, *others = explained(seen)
    assert first.hypothesis == fault.cause and fault.says in first.what, [first.what, *(c.what for c in others)]
    assert first.before > 1 and first.after <= 1 and first.complete


@pytest.mark.parametrize("name", [name for name in MAKE if name.split()[0] in STEPS and "far" not in name])
def test_the_third_implementation_takes_torchs_steps(name):
    grads = gradients(STEPS_TAKEN)
    model = Torch(start())
    optimizer = MAKE[name](model.parameters())
    port = port_of(optimizer, {id(p): n for n, p in model.named_parameters()})
    expected = torch_run(optimizer, model, grads)
    seen = observed(Fault(MAKE[name], lambda: None), expected, grads, port)
    run = trajectory(port, seen.start, seen.steps)
    assert all(np.abs(values[n] - expected[n][i].reshape(-1)).max() < 1e-10 for i, values in enumerate(run) for n in expected)
    # So nothing is to be explained, and nothing is.
    assert explained(seen) == ()


@pytest.mark.parametrize(
    ("reset", "says"),
    [
        ("count", "The step count begins anew on resume, where torch has taken 6 steps"),
        ("moments", "Moments begin anew on resume, the step count goes on"),
        ("all", "Moments and step count begin anew on resume"),
    ],
)
def test_what_is_lost_on_resume_is_named(reset, says):
    grads, model = gradients(2 * STEPS_TAKEN), Torch(start())
    first, later = ({n: g[part] for n, g in grads.items()} for part in (slice(0, STEPS_TAKEN), slice(STEPS_TAKEN, None)))
    optimizer = ADAM(model.parameters())
    begun = {name: values[-1] for name, values in torch_run(optimizer, model, first).items()}
    port = port_of(optimizer, {id(p): n for n, p in model.named_parameters()})
    with jax.enable_x64(True):
        tx = adam()
        (mine, rest), (fresh, _) = flax_run(tx, start(), first)[1], tx.init(begun)
        state = {
            "count": (mine._replace(count=fresh.count), rest),
            "moments": (fresh._replace(count=mine.count), rest),
            "all": (fresh, rest),
        }
        actual, _ = flax_run(tx, begun, later, state[reset])
        seen = observed(Fault(ADAM, adam), actual, later, port)
        seen = replace(seen, start={name: array.reshape(-1) for name, array in begun.items()})
        assert explained(seen)[0].what == says
        assert (
            explained(
                replace(seen, steps=observed(Fault(ADAM, adam), flax_run(tx, begun, later, (mine, rest))[0], later, port).steps)
            )
            == ()
        )
