"""Planted faults of training: each is seen in the step that it concerns, and named."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from helpers import random
from torch import nn, optim
from torch.optim import lr_scheduler as lrs

import parity
from parity.training.recipe import Recipe
from parity.training.steps import train_both

RATE, STEPS = 0.05, 4


class Ours(nn.Module):
    """A parameter without axes, a square one, and one that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 4)
        self.gain, self.idle = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(2))

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.first(x))) * self.gain


class Theirs(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.gain, self.idle = nnx.Param(jnp.zeros(())), nnx.Param(jnp.zeros(2))

    def __call__(self, x: Any) -> Any:
        return self.last(jnp.tanh(self.first(x))) * self.gain[...]


def models() -> tuple[Ours, Theirs]:
    torch.manual_seed(0)
    ours, theirs = Ours(), Theirs(nnx.Rngs(0))
    parity.transfer(ours, theirs)
    return ours, theirs


def batches(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = random("batches for causes")
    return [(rng.standard_normal((6, 3)), 3 * rng.standard_normal((6, 4))) for _ in range(steps)]


@dataclass(frozen=True)
class Fault:
    """A port of an optimizer with a fault.

    Attributes:
        make: torch's optimizer.
        port: the transformation with the fault.
        cause: the hypothesis that must name it.
        says: what the cause must say.
        options: of the recipe.
        step: the first that must show it.
    """

    make: Callable[..., Any]
    port: Callable[[], Any]
    cause: str
    says: str
    options: dict[str, Any]
    step: int = 1


def fault(make: Any, port: Any, cause: str, says: str, step: int = 1, **options: Any) -> Fault:
    return Fault(make, port, cause, says, options, step)


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
FALL = {"scheduler": lambda optimizer: lrs.ExponentialLR(optimizer, 0.9)}
FAULTS = {
    "decay coupled": fault(DECAYED, lambda: adam(optax.add_decayed_weights(0.1)), "coupled weight decay", "is coupled"),
    "decay decoupled": fault(
        torchs(optim.Adam, weight_decay=0.1),
        lambda: optax.adamw(RATE, weight_decay=0.1),
        "coupled weight decay",
        "is decoupled",
    ),
    "decay without rate": fault(
        DECAYED,
        lambda: optax.chain(adam(), optax.add_decayed_weights(-0.1)),
        "coupled weight decay",
        "not multiplied by the learning rate",
    ),
    "decay default": fault(
        torchs(optim.AdamW), lambda: optax.adamw(RATE), "weight decay", "is 0.0001, the default of optax.adamw"
    ),
    "no decay": fault(DECAYED, adam, "weight decay", "There is no weight decay"),
    "eps in the root": fault(ADAM, lambda: adam(eps=0.0, eps_root=1e-8), "place of epsilon", "inside the root"),
    "eps in the root of RMSprop": fault(
        torchs(optim.RMSprop), lambda: optax.rmsprop(RATE, decay=0.99), "place of epsilon", "inside the root"
    ),
    "eps forgotten": fault(ADAM, lambda: adam(eps=0.0), "epsilon", "eps is forgotten"),
    "another eps": fault(ADAM, lambda: adam(eps=1e-7), "epsilon", "eps is 1e-07"),
    "schedule ahead": fault(torchs(optim.SGD), lambda: optax.sgd(falling(1)), "schedule", "one step ahead", **FALL),
    "schedule behind": fault(torchs(optim.SGD), lambda: optax.sgd(falling(-1)), "schedule", "one step behind", **FALL),
    "no schedule": fault(torchs(optim.SGD), lambda: optax.sgd(RATE), "schedule", "stays as it is", 2, **FALL),
    "no bias correction": fault(ADAM, undebiased, "bias correction", "no bias correction"),
    "betas exchanged": fault(ADAM, lambda: adam(b1=0.999, b2=0.9), "betas", "exchanged", 2),
    "another beta": fault(ADAM, lambda: adam(b2=0.98), "betas", "0.9 and 0.98", 2),
    "rate": fault(ADAM, lambda: adam(rate=0.03), "learning rate", "The learning rate is 0.03"),
    "momentum the other way": fault(MOMENTUM, lambda: optax.sgd(RATE, momentum=0.2), "momentum", "momentum is 0.2", 2),
    "no dampening": fault(
        torchs(optim.SGD, momentum=0.8, dampening=0.3), lambda: optax.sgd(RATE, momentum=0.8), "momentum", "dampening is 0", 2
    ),
    "first gradient damped": fault(
        torchs(optim.SGD, momentum=0.8, dampening=0.3),
        lambda: optax.chain(optax.scale(0.7), optax.sgd(RATE, momentum=0.8)),
        "momentum",
        "first gradient is damped too",
    ),
    "nesterov": fault(
        torchs(optim.SGD, momentum=0.8, nesterov=True), lambda: optax.sgd(RATE, momentum=0.8), "momentum", "left out"
    ),
    "momentum behind the rate": fault(
        MOMENTUM,
        lambda: optax.chain(optax.scale_by_learning_rate(falling(0)), optax.trace(0.8)),
        "momentum",
        "behind the learning rate",
        2,
        **FALL,
    ),
    "alpha of RMSprop": fault(
        torchs(optim.RMSprop), lambda: optax.rmsprop(RATE, eps_in_sqrt=False), "moving average", "is 0.9, the default"
    ),
    "no amsgrad": fault(torchs(optim.Adam, amsgrad=True, betas=(0.9, 0.5)), lambda: adam(b2=0.5), "amsgrad", "left out", 2),
    "amsgrad of optax": fault(
        torchs(optim.Adam, amsgrad=True, betas=(0.9, 0.5)), lambda: optax.amsgrad(RATE, b2=0.5), "amsgrad", "optax.amsgrad", 2
    ),
    "adagrad of optax": fault(
        torchs(optim.Adagrad),
        lambda: optax.adagrad(RATE),
        "sum of squares",
        "begin at 0.1, as in optax.adagrad, and eps inside",
    ),
    "ascent": fault(torchs(optim.SGD), lambda: optax.sgd(-RATE), "sign", "made larger"),
    "clipped by value": fault(
        torchs(optim.SGD), lambda: optax.chain(optax.clip(0.5), optax.sgd(RATE)), "gradient clipping", "by value", max_norm=0.5
    ),
    "clipped by norm": fault(
        torchs(optim.SGD),
        lambda: optax.chain(parity.clip_grad_norm(0.5), optax.sgd(RATE)),
        "gradient clipping",
        "by their norm",
        max_value=0.5,
    ),
    "not clipped": fault(torchs(optim.SGD), lambda: optax.sgd(RATE), "gradient clipping", "are not clipped", max_norm=0.5),
    "clipped by optax": fault(
        torchs(optim.SGD),
        lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(RATE)),
        "gradient clipping",
        "without torch's 1e-6",
        max_norm=0.5,
    ),
    "summed batches": fault(
        torchs(optim.Adam, eps=1e-2), lambda: adam(optax.scale(2.0), eps=1e-2), "gradient accumulation", "summed", accumulate=2
    ),
    "another optimizer": fault(torchs(optim.NAdam), adam, "another optimizer", "The optimizer is Adam,"),
    "two faults": fault(torchs(optim.AdamW), lambda: optax.adamw(RATE, eps=0.0, eps_root=1e-8), "", "", 1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_optimizer_is_seen_where_it_begins_and_named(name):
    fault, (ours, theirs) = FAULTS[name], models()
    ours.idle.requires_grad_(False)
    held = optax.multi_transform(
        {"moved": fault.port(), "held": optax.set_to_zero()},
        lambda tree: {key: "held" if key == "idle" else "moved" for key in tree},
    )
    steps = batches(STEPS * fault.options.get("accumulate", 1))
    found = train_both(ours, theirs, fault.make, steps, "mse", recipe=Recipe(transformation=held, **fault.options))
    assert found.first == fault.step and found.drift[fault.step - 1].gradients < 1e-13
    first = found.causes[0]
    if fault.cause:
        assert first.hypothesis == fault.cause and fault.says in first.what, [c.what for c in found.causes]
    else:
        assert {*first.hypothesis.split(" and ")} == {"weight decay", "place of epsilon"}
    assert first.before > 1 and first.after <= 1 and f"cause: {first.hypothesis}. {first.what}" in str(found)
