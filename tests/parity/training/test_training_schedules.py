"""Every scheduler against its schedule, at every step; and inside the optimizers that it moves."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lrs
from training_helpers import Flax, Torch, flax_run, gradients, parted, start, torch_run

import parity
from parity.frameworks import load
from parity.training import schedules

STEPS = 1000


def two_groups() -> optim.Optimizer:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    return optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.03}], lr=0.1, momentum=0.9)


class Mine(lrs.LRScheduler):
    """A scheduler of the user's own, which depends on the rate before."""

    def get_lr(self) -> list[Any]:
        return [g["lr"] * (0.5 if self.last_epoch in (3, 4) else 1.0) + 1e-4 for g in self.optimizer.param_groups]


Make = Callable[[optim.Optimizer], Any]
FORMULAS: dict[str, Make] = {
    "StepLR": lambda o: lrs.StepLR(o, 7, 0.9),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [3, 50, 50, 400], 0.3),
    "MultiStepLR from the first": lambda o: lrs.MultiStepLR(o, [0, 2, 9], 0.3),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.25, 30),
    "ConstantLR for no step": lambda o: lrs.ConstantLR(o, 0.25, 0),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.1, 0.9, 300),
    "LinearLR for no step": lambda o: lrs.LinearLR(o, 0.1, 0.9, 0),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.99),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 500, 1.7),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 1200, 0.01),
    "CosineAnnealingLR again and again": lambda o: lrs.CosineAnnealingLR(o, 31, 0.01),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 13, 1, 0.001),
    "CosineAnnealingWarmRestarts, longer": lambda o: lrs.CosineAnnealingWarmRestarts(o, 10, 3, 0.001),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, [0.2, 0.5], total_steps=STEPS),
    "OneCycleLR in three": lambda o: lrs.OneCycleLR(o, 0.2, total_steps=STEPS, three_phase=True, anneal_strategy="linear"),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, [0.2, 0.3], 30, 50),
    "CyclicLR triangular2": lambda o: lrs.CyclicLR(o, 0.01, 0.2, 30, mode="triangular2"),
    "CyclicLR exp_range": lambda o: lrs.CyclicLR(o, 0.01, 0.2, 30, mode="exp_range", gamma=0.999, cycle_momentum=False),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.01, 1, 50), lrs.CosineAnnealingLR(o, 900), lrs.ExponentialLR(o, 0.99)], [50, 700]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.5, 20), lrs.ExponentialLR(o, 0.99), lrs.StepLR(o, 100)]
    ),
}
TABLES: dict[str, Make] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, [lambda e: min(1.0, e / 10), lambda e: 0.95**e]),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda e: 0.99 if e % 3 else 1.0),
    "one of your own": Mine,
    "CyclicLR with a function": lambda o: lrs.CyclicLR(o, 0.01, 0.2, 30, scale_fn=lambda x: 1 / x),
    "a chain that overwrites": lambda o: lrs.ChainedScheduler(
        [lrs.CosineAnnealingWarmRestarts(o, 10), lrs.ExponentialLR(o, 0.99)]
    ),
    "a sequence with one of these": lambda o: lrs.SequentialLR(
        o, [lrs.LambdaLR(o, lambda e: (e + 1) / 8), lrs.ExponentialLR(o, 0.9)], [8]
    ),
    "a factor below 0": lambda o: lrs.ExponentialLR(o, -0.99),
}


def torch_rates(optimizer: optim.Optimizer, scheduler: Any, steps: int) -> np.ndarray:
    """The rates that the coming steps use, by step and group."""
    found = []
    for _ in range(steps):
        found.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return np.array(found)


def rates(scheduler: Any, at: np.ndarray, **options: Any) -> np.ndarray:
    made = [parity.to_optax(scheduler, group=group, **options) for group in (0, 1)]
    return np.stack([np.asarray(jax.jit(jax.vmap(schedule))(at)) for schedule in made], axis=1)


@pytest.mark.parametrize("taken", [0, 5])
@pytest.mark.parametrize("name", [*FORMULAS, *TABLES])
def test_the_rate_of_every_step(name, taken):
    with jax.enable_x64(True):
        optimizer = two_groups()
        scheduler = (FORMULAS | TABLES)[name](optimizer)
        torch_rates(optimizer, scheduler, taken)
        at = np.arange(taken, STEPS)
        by_table = rates(scheduler, at, steps=STEPS - taken)
        by_formula = rates(scheduler, at) if name in FORMULAS else by_table
        expected = torch_rates(optimizer, scheduler, STEPS - taken)
        assert (by_table == expected).all()
        assert np.abs(by_formula - expected).max() < 1e-12 * np.abs(expected).max()
        # A schedule that is off by one would be seen.
        assert "no step" in name or np.abs(by_formula[1:] - expected[:-1]).max() > 1e-6


@pytest.mark.parametrize("name", FORMULAS)
def test_a_rate_in_float32_is_good_to_rounding(name):
    optimizer = two_groups()
    scheduler = FORMULAS[name](optimizer)
    actual = rates(scheduler, np.arange(STEPS, dtype=np.int32))
    assert actual.dtype == np.float32
    expected = torch_rates(optimizer, scheduler, STEPS)
    # A cosine of a large argument loses digits: three full turns in 31 steps each.
    assert np.abs(actual - expected).max() < (3e-5 if "again" in name else 2e-6) * expected.max()


@pytest.mark.parametrize("name", TABLES)
def test_what_has_no_formula_asks_for_steps(name):
    with pytest.raises(parity.InputError, match="has no formula that could be compiled; pass steps=N"):
        parity.to_optax(TABLES[name](two_groups()), group=0)


def test_a_table_says_nothing_where_nothing_is_known():
    optimizer = two_groups()
    scheduler = lrs.StepLR(optimizer, 3)
    torch_rates(optimizer, scheduler, 4)
    schedule = parity.to_optax(scheduler, group=0, steps=5)
    assert [math.isnan(schedule(t)) for t in (0, 3, 4, 8, 9, 100)] == [True, True, False, False, True, True]


@pytest.mark.parametrize("steps", [None, 40])
def test_one_cycle_ends_where_torch_raises(steps):
    scheduler = lrs.OneCycleLR(two_groups(), 0.1, total_steps=10)
    schedule = parity.to_optax(scheduler, steps=steps)
    assert [math.isnan(schedule(t)) for t in (0, 9, 10, 11, 500)] == [False, False, False, True, True]


def test_a_scheduler_that_steps_once_an_epoch():
    optimizer = two_groups()
    scheduler = lrs.ExponentialLR(optimizer, 0.5)
    schedule = parity.to_optax(scheduler, group=1, every=4)
    expected = torch_rates(optimizer, scheduler, 3)[:, 1].repeat(4)
    np.testing.assert_allclose([schedule(t) for t in range(12)], expected, rtol=1e-6)


def test_neither_scheduler_nor_optimizer_moves():
    optimizer = two_groups()
    scheduler = lrs.CosineAnnealingWarmRestarts(optimizer, 5, 2)
    torch_rates(optimizer, scheduler, 7)
    before = repr(scheduler.state_dict()), repr(optimizer.state_dict())
    parity.to_optax(scheduler, group=0)
    parity.to_optax(scheduler, group=0, steps=20)
    assert before == (repr(scheduler.state_dict()), repr(optimizer.state_dict()))


def test_a_scheduler_of_a_metric_is_refused():
    with pytest.raises(parity.InputError, match=r"by a metric.*optax.contrib.reduce_on_plateau"):
        parity.to_optax(lrs.ReduceLROnPlateau(two_groups()))


def test_a_rate_changed_by_hand_is_found():
    optimizer = two_groups()
    scheduler = lrs.ExponentialLR(optimizer, 0.9)
    torch_rates(optimizer, scheduler, 3)
    optimizer.param_groups[1]["lr"] = 0.5
    with pytest.raises(parity.InputError, match=r"after 3 steps lr of group 1 is 0.5, by the formula 0.02187; .* steps=N"):
        parity.to_optax(scheduler, group=0)
    assert float(parity.to_optax(scheduler, group=1, steps=2)(3)) == 0.5


def test_groups_with_rates_of_their_own_ask_which():
    scheduler = lrs.ExponentialLR(two_groups(), 0.9)
    with pytest.raises(parity.InputError, match="2 parameter groups have rates of their own; pass group=0"):
        parity.to_optax(scheduler)
    with pytest.raises(parity.InputError, match="group must be from 0 to 1, got 2"):
        parity.to_optax(scheduler, group=2)
    assert float(parity.to_optax(lrs.ExponentialLR(optim.SGD([nn.Parameter(torch.zeros(1))], 0.5), 0.9))(1)) == pytest.approx(
        0.45
    )


def test_formulas_are_the_same_in_numpy_alone():
    form = schedules.Every(schedules.Sequence((schedules.ExponentialLR(1.0, 0.5), schedules.StepLR(4.0, 0.5, 2)), (3,)), 2)
    np.testing.assert_allclose(form.at(np.arange(12)), [1, 1, 0.5, 0.5, 0.25, 0.25, 4, 4, 4, 4, 2, 2])


# ---------------------------------------------------------------- inside optimizers

MOVED: dict[str, tuple[Callable[[Any], optim.Optimizer], Make]] = {
    "SGD, momentum cycles": (
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda o: lrs.OneCycleLR(o, 0.2, total_steps=60),
    ),
    "SGD nesterov, momentum cycles": (
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda o: lrs.CyclicLR(o, 0.01, 0.2, 7, 11),
    ),
    "AdamW, beta1 cycles": (lambda p: optim.AdamW(p, lr=0.1, amsgrad=True), lambda o: lrs.OneCycleLR(o, 0.2, total_steps=60)),
    "NAdam, beta1 cycles": (lambda p: optim.NAdam(p, lr=0.1), lambda o: lrs.CyclicLR(o, 0.01, 0.2, 7, mode="triangular2")),
    "RAdam, beta1 cycles": (lambda p: optim.RAdam(p, lr=0.1), lambda o: lrs.OneCycleLR(o, 0.2, total_steps=60)),
    "Adamax, beta1 cycles": (lambda p: optim.Adamax(p, lr=0.1), lambda o: lrs.OneCycleLR(o, 0.2, total_steps=60)),
    "RMSprop, rate falls": (lambda p: optim.RMSprop(p, lr=0.1, momentum=0.9), lambda o: lrs.ExponentialLR(o, 0.9)),
    "Adagrad, rate falls twice": (lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1), lambda o: lrs.StepLR(o, 10)),
    "ASGD, rate falls": (lambda p: optim.ASGD(p, lr=0.1, lambd=0.1, t0=9), lambda o: lrs.ExponentialLR(o, 0.9)),
    "Rprop, rate matters once": (lambda p: optim.Rprop(p, lr=0.1), lambda o: lrs.ExponentialLR(o, 0.9)),
}


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("steps", [None, 60])
def test_a_schedule_moves_an_optimizer_as_its_scheduler_does(name, steps):
    with jax.enable_x64(True):
        make, schedule = MOVED[name]
        model = Torch(start())
        optimizer = make(model.parameters())
        scheduler = schedule(optimizer)
        tx = parity.to_optax(optimizer, scheduler=scheduler, steps=steps)
        expected = torch_run(optimizer, model, gradients(60), scheduler.step)
        assert parted(flax_run(tx, start(), gradients(60))[0], expected) < 1e-13


def test_every_group_has_its_own_rate_and_momentum():
    with jax.enable_x64(True):
        model = Torch(start())
        groups = [{"params": [model.a, model.b]}, {"params": [model.c, model.d, model.e]}]
        optimizer = optim.SGD(groups, lr=0.1, momentum=0.9)
        scheduler = lrs.OneCycleLR(optimizer, [0.2, 0.5], total_steps=40, max_momentum=[0.9, 0.6], base_momentum=[0.8, 0.2])
        tx = parity.to_optax(optimizer, model, Flax(start()), scheduler=scheduler)
        expected = torch_run(optimizer, model, gradients(40), scheduler.step)
        assert parted(flax_run(tx, start(), gradients(40))[0], expected) < 1e-13


def test_a_scheduler_that_is_not_given_is_missed():
    optimizer = two_groups()
    lrs.StepLR(optimizer, 3)
    with pytest.raises(parity.InputError, match=r"a scheduler moves this optimizer; pass scheduler=\.\.\., or scheduler=False"):
        parity.to_optax(optimizer)
    kept = optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    lrs.StepLR(kept, 3)
    tx = parity.to_optax(kept, scheduler=False)
    updates, _ = tx.update({"a": np.float32([1, 2])}, tx.init({"a": np.float32([0, 0])}), {"a": np.float32([0, 0])})
    np.testing.assert_allclose(updates["a"], [-0.1, -0.2])


def test_a_momentum_that_moves_in_rmsprop_is_refused():
    optimizer = optim.RMSprop([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    scheduler = lrs.OneCycleLR(optimizer, 0.2, total_steps=10)
    with pytest.raises(parity.InputError, match=r"RMSprop whose momentum a scheduler moves.*cycle_momentum=False"):
        parity.to_optax(optimizer, scheduler=scheduler)


def test_no_warning_of_torchs_reaches_the_caller():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = two_groups()
        load("torch.schedulers").rehearse(
            lrs.SequentialLR(optimizer, [lrs.ConstantLR(optimizer), lrs.StepLR(optimizer, 2)], [2]), 5
        )
