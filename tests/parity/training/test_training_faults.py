"""Faults that ports of optimizers have: the comparison that the twins pass must fail on each of them."""

from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest
from torch import optim
from torch.optim import lr_scheduler as lrs
from training_helpers import MAKE, Torch, flax_run, gradients, parted, start, torch_run

import parity

RATE = 0.05


def constant(p: Any) -> Any:
    return None


def falling(optimizer: Any) -> Any:
    return lrs.ExponentialLR(optimizer, 0.95)


def twin_of(make: Callable[[Any], Any]) -> optax.GradientTransformation:
    return parity.to_optax(make(Torch(start()).parameters()))


def adam(**options: Any) -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_adam(**options), optax.scale_by_learning_rate(RATE))


def coupled(decay: float) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(decay), adam())


def no_bias_correction() -> optax.GradientTransformation:
    return optax.chain(
        optax.ema(0.9, debias=False), optax.scale_by_rms(0.999, eps_in_sqrt=False), optax.scale_by_learning_rate(RATE)
    )


def shifted(steps: int) -> optax.GradientTransformation:
    return optax.sgd(lambda count: RATE * 0.95 ** (count + steps))


# torch's optimizer, its scheduler, the fault, and the port without it, if optax has one.
FAULTS: dict[str, tuple[Any, Any, Callable[[], Any], Callable[[], Any] | None]] = {
    "decay coupled for decoupled": (
        lambda p: optim.AdamW(p, lr=RATE, weight_decay=0.1),
        constant,
        lambda: coupled(0.1),
        lambda: optax.adamw(RATE, weight_decay=0.1),
    ),
    "decay decoupled for coupled": (
        lambda p: optim.Adam(p, lr=RATE, weight_decay=0.1),
        constant,
        lambda: optax.adamw(RATE, weight_decay=0.1),
        lambda: coupled(0.1),
    ),
    "decay default": (
        lambda p: optim.AdamW(p, lr=RATE),
        constant,
        lambda: optax.adamw(RATE),
        lambda: optax.adamw(RATE, weight_decay=1e-2),
    ),
    "eps inside the root": (
        lambda p: optim.Adam(p, lr=RATE),
        constant,
        lambda: adam(eps=0.0, eps_root=1e-8),
        adam,
    ),
    "eps inside the root of RMSprop": (
        lambda p: optim.RMSprop(p, lr=RATE),
        constant,
        lambda: optax.rmsprop(RATE, decay=0.99),
        lambda: optax.rmsprop(RATE, decay=0.99, eps_in_sqrt=False),
    ),
    "eps forgotten": (lambda p: optim.Adam(p, lr=RATE), constant, lambda: adam(eps=1e-30), adam),
    "schedule one step ahead": (lambda p: optim.SGD(p, lr=RATE), falling, lambda: shifted(1), lambda: shifted(0)),
    "schedule one step behind": (lambda p: optim.SGD(p, lr=RATE), falling, lambda: shifted(-1), lambda: shifted(0)),
    "no bias correction": (lambda p: optim.Adam(p, lr=RATE), constant, no_bias_correction, adam),
    "decay of RMSprop": (
        lambda p: optim.RMSprop(p, lr=RATE),
        constant,
        lambda: optax.rmsprop(RATE, eps_in_sqrt=False),
        lambda: optax.rmsprop(RATE, decay=0.99, eps_in_sqrt=False),
    ),
    "ascent for descent": (
        MAKE["SGD decay"],
        constant,
        lambda: twin_of(lambda p: optim.SGD(p, lr=RATE, weight_decay=0.1)),
        None,
    ),
    "amsgrad forgotten": (
        MAKE["Adam amsgrad"],
        constant,
        lambda: twin_of(lambda p: optim.Adam(p, lr=RATE, weight_decay=0.1)),
        None,
    ),
    "optax's amsgrad": (lambda p: optim.Adam(p, lr=RATE, amsgrad=True), constant, lambda: optax.amsgrad(RATE), None),
    "optax's nadam": (lambda p: optim.NAdam(p, lr=RATE), constant, lambda: optax.nadam(RATE), None),
    "optax's radam": (lambda p: optim.RAdam(p, lr=RATE), constant, lambda: optax.radam(RATE), None),
    "optax's adagrad": (lambda p: optim.Adagrad(p, lr=RATE), constant, lambda: optax.adagrad(RATE), None),
    "optax's rprop": (lambda p: optim.Rprop(p, lr=RATE), constant, lambda: optax.rprop(RATE), None),
    "first gradient damped": (
        MAKE["SGD dampening"],
        constant,
        lambda: optax.chain(
            optax.scale(-1.0), optax.add_decayed_weights(0.1), optax.scale(0.7), optax.trace(0.9), optax.scale(-RATE)
        ),
        None,
    ),
    "momentum after a rate that moves": (
        lambda p: optim.RMSprop(p, lr=RATE, momentum=0.9),
        falling,
        lambda: optax.rmsprop(lambda count: RATE * 0.95**count, decay=0.99, eps_in_sqrt=False, momentum=0.9),
        None,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen_and_the_port_without_it_passes(name):
    make, schedule, fault, clean = FAULTS[name]
    with jax.enable_x64(True):
        model, grads = Torch(start()), gradients(30)
        optimizer = make(model.parameters())
        scheduler = schedule(optimizer)
        tx = parity.to_optax(optimizer, scheduler=scheduler)
        expected = torch_run(optimizer, model, grads, scheduler.step if scheduler else lambda: None)
        assert parted(flax_run(tx, start(), grads)[0], expected) < 1e-13
        assert parted(flax_run(fault(), start(), grads)[0], expected) > 1e-9
        if clean:
            assert parted(flax_run(clean(), start(), grads)[0], expected) < 1e-13
