"""Every optimizer with its options crossed, resumed in the middle in both directions."""

import copy
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import random
from torch import optim
from training_helpers import STEPS, Flax, Torch, flax_run, gradients, parted, start, torch_run

import parity
from parity.training.optimizers import KNOWN

pytestmark = pytest.mark.slow

# Combinations of each optimizer that are drawn, with a fixed seed: a few of up to 256.
DRAWN = 12
BEGUN = 7
YES: Any = (False, True)
COMMON: dict[str, Any] = dict(weight_decay=(0, 0.1), maximize=YES, foreach=(None, True))
ADAM = COMMON | dict(betas=((0.9, 0.999), (0.3, 0.8)), eps=(1e-8, 1e-3), amsgrad=YES, fused=(None, True))
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": COMMON | dict(momentum=(0, 0.9), dampening=(0, 0.3), nesterov=YES),
    "Adam": ADAM | dict(decoupled_weight_decay=YES),
    "AdamW": ADAM,
    "NAdam": COMMON | dict(betas=((0.9, 0.999), (0.5, 0.8)), momentum_decay=(4e-3, 0.1), decoupled_weight_decay=YES),
    "RAdam": COMMON | dict(betas=((0.9, 0.999), (0.5, 0.6)), decoupled_weight_decay=YES),
    "Adagrad": COMMON | dict(lr_decay=(0, 0.1), initial_accumulator_value=(0, 0.2), eps=(1e-10, 1e-3), fused=(None, True)),
    "Adadelta": COMMON | dict(rho=(0.9, 0.5), eps=(1e-6, 1e-3)),
    "RMSprop": COMMON | dict(alpha=(0.99, 0.5), momentum=(0, 0.9), centered=YES, eps=(1e-8, 1e-2)),
    "Adamax": COMMON | dict(betas=((0.9, 0.999), (0.5, 0.8))),
    "ASGD": COMMON | dict(lambd=(1e-4, 0.01), alpha=(0.75, 0.5), t0=(1e6, 20), foreach=(False,)),
    "Rprop": dict(etas=((0.5, 1.2), (0.4, 1.3)), step_sizes=((1e-6, 50), (1e-3, 0.2)), maximize=YES, foreach=(None, True)),
}
RATES = (0.05, 0.003, torch.tensor(0.05, dtype=torch.float64))


def test_every_optimizer_is_there():
    assert OPTIONS.keys() == set(KNOWN)


def refuses(kind: str, chosen: dict[str, Any]) -> bool:
    """What torch itself refuses."""
    both = chosen.get("foreach") and chosen.get("fused")
    nesterov = chosen.get("nesterov") and (not chosen["momentum"] or chosen["dampening"])
    tensor = isinstance(chosen["lr"], torch.Tensor) and chosen.get("foreach")
    return bool(both or nesterov or tensor)


def combinations(kind: str) -> list[dict[str, Any]]:
    options = OPTIONS[kind] | {"lr": RATES}
    every = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    allowed = [chosen for chosen in every if not refuses(kind, chosen)]
    rng = random(f"options of {kind}")
    return [allowed[place] for place in rng.choice(len(allowed), min(DRAWN, len(allowed)), replace=False)]


def last(found: Any) -> dict[str, np.ndarray]:
    return {name: values[-1:] for name, values in found.items()}


def steady(optimizer: Any, model: Torch, rest: Any, expected: Any) -> dict[str, np.ndarray]:
    """Elements that torch itself brings to the same place from parameters that are moved by one ulp.

    An element that never gets a gradient, but weight decay, swings about 0: with Adamax at lr=0.05 a rounding doubles there
    at each swing, and is a millionth after 100 steps, in torch as anywhere.
    """
    moved, again = copy.deepcopy((model, optimizer))
    with torch.no_grad():
        for p in moved.parameters():
            p.mul_(1 + 2**-52)
    found = torch_run(again, moved, rest)
    kept = {name: (np.abs(found[name] - values) < 1e-13 * np.abs(values).max()).all(0) for name, values in expected.items()}
    left = {name: np.argwhere(~mask).tolist() for name, mask in kept.items() if not mask.all()}
    assert left in ({}, {"a": [[0, 0]]}), left
    return kept


def of(found: Any, kept: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.where(kept[name], values, 0.0) for name, values in found.items()}


@pytest.mark.parametrize("kind", OPTIONS)
def test_options_crossed_from_a_random_state_and_resumed_both_ways(kind):
    whole = gradients(BEGUN + STEPS)
    begun, rest = ({n: g[part] for n, g in whole.items()} for part in (slice(0, BEGUN), slice(BEGUN, None)))
    first, second = ({n: g[part] for n, g in rest.items()} for part in (slice(0, 50), slice(50, None)))
    for chosen in combinations(kind):
        with jax.enable_x64(True):
            ours = Torch(start())
            optimizer = getattr(optim, kind)(ours.parameters(), **chosen)
            torch_run(optimizer, ours, begun)
            theirs = Flax(start())

            def at(model: Torch, taken: Any, steps: int, theirs: Any = theirs) -> tuple[Any, Any, Any]:
                parity.transfer(model, theirs)
                tx = parity.to_optax(taken, model, theirs)
                params = {name: jnp.asarray(p.detach().numpy()) for name, p in model.named_parameters()}
                return tx, params, parity.transfer_optimizer(taken, tx.init(params), model, theirs, step=steps).value

            tx, params, state = at(ours, optimizer, BEGUN)
            model, twin = copy.deepcopy((ours, optimizer))
            halfway, half = copy.deepcopy((ours, optimizer))
            whole_run = torch_run(twin, model, rest)
            kept = steady(optimizer, ours, rest, whole_run)
            expected = of(whole_run, kept)
            assert parted(of(flax_run(tx, params, rest, state)[0], kept), expected) < 1e-13, chosen

            torch_run(half, halfway, first)
            resumed = at(halfway, half, BEGUN + 50)
            assert parted(of(last(flax_run(*resumed[:2], second, resumed[2])[0]), kept), last(expected)) < 1e-13, chosen

            found, state = flax_run(tx, params, first, state)
            back = Torch({name: values[-1] for name, values in found.items()})
            fresh = getattr(optim, kind)(back.parameters(), **chosen)
            parity.transfer_optimizer(state, fresh, back, theirs, step=BEGUN + 50)
            assert parted(of(last(torch_run(fresh, back, second)), kept), last(expected)) < 1e-13, chosen
