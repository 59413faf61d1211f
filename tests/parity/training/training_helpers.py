"""The same gradients through an optimizer of torch and its twin, and how far the two part."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from helpers import random
from torch import nn, optim

import parity
from parity.frameworks.jax.running import QUICK

torch.set_num_threads(1)

STEPS = 100
# All sizes different, one square, one without axes.
SHAPES = {"a": (5, 3), "b": (4,), "c": (3, 2, 4), "d": (3, 3), "e": ()}

Arrays = dict[str, np.ndarray]


def start(dtype: str = "float64") -> Arrays:
    rng = random("training parameters")
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def gradients(steps: int = STEPS, dtype: str = "float64") -> Arrays:
    """Of every size from 1e-3 to 10, with elements that are 0 throughout or now and then."""
    rng = random("training gradients")
    found = {}
    for name, shape in SHAPES.items():
        scale = 10.0 ** rng.uniform(-3, 1, (steps, *shape))
        found[name] = (rng.standard_normal((steps, *shape)) * scale * (rng.random((steps, *shape)) > 0.1)).astype(dtype)
    found["a"][:, 0, 0] = 0
    return found


class Torch(nn.Module):
    """Parameters by name."""

    def __init__(self, arrays: Arrays):
        super().__init__()
        for name, array in arrays.items():
            setattr(self, name, nn.Parameter(torch.tensor(array)))


class Flax(nnx.Module):
    """Params by name."""

    def __init__(self, arrays: Arrays):
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(jnp.array(array)))


def torch_run(
    optimizer: torch.optim.Optimizer, model: Torch, grads: Arrays, after: Callable[[], Any] = lambda: None
) -> dict[str, np.ndarray]:
    """Parameters after every step, by name; a gradient is missing where `grads` has none."""
    found: dict[str, list[np.ndarray]] = {name: [] for name, _ in model.named_parameters()}
    for step in range(len(next(iter(grads.values())))):
        for name, p in model.named_parameters():
            p.grad = torch.tensor(grads[name][step]) if name in grads else None
        optimizer.step()
        after()
        for name, p in model.named_parameters():
            found[name].append(p.detach().numpy().copy())
    return {name: np.stack(values) for name, values in found.items()}


def flax_run(tx: optax.GradientTransformation, params: Any, grads: Arrays, state: Any = None) -> tuple[Arrays, Any]:
    """Parameters after every step, and the last state; all compiled."""
    state = tx.init(params) if state is None else state

    def step(carry: Any, g: Any) -> Any:
        params, state = carry
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    full = {name: grads.get(name, np.zeros((len(next(iter(grads.values()))), *p.shape), p.dtype)) for name, p in params.items()}
    run = jax.jit(functools.partial(jax.lax.scan, step), compiler_options=QUICK.get(jax.default_backend()))
    (_, state), found = run((params, state), full)
    return {name: np.asarray(values) for name, values in found.items()}, state


def parted(actual: Arrays, expected: Arrays) -> float:
    """The largest difference, as a part of the largest value that the array has had."""
    assert actual.keys() == expected.keys()
    worst = 0.0
    for name, values in expected.items():
        assert actual[name].dtype == values.dtype and actual[name].shape == values.shape
        largest = max(np.abs(values).max(), np.finfo(np.float32).tiny)
        difference = np.abs(actual[name] - values).max()
        worst = max(worst, difference / largest if np.isfinite(difference) else np.inf)
    return float(worst)


# ---------------------------------------------------------------- optimizers

Make = Callable[[Any], optim.Optimizer]
MAKE: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.05),
    "SGD decay": lambda p: optim.SGD(p, lr=0.05, weight_decay=0.1, maximize=True),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    "SGD dampening": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.1, maximize=True),
    "Adam": lambda p: optim.Adam(p, lr=0.05),
    "Adam decay": lambda p: optim.Adam(p, lr=0.05, weight_decay=0.1, maximize=True, eps=1e-4),
    "Adam far lerp": lambda p: optim.Adam(p, lr=0.05, betas=(0.3, 0.9)),
    "Adam no momentum": lambda p: optim.Adam(p, lr=0.05, betas=(0.0, 0.9)),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=0.05, weight_decay=0.1, amsgrad=True),
    "Adam decoupled": lambda p: optim.Adam(p, lr=0.05, weight_decay=0.1, decoupled_weight_decay=True),
    "Adam foreach": lambda p: optim.Adam(p, lr=0.05, weight_decay=0.1, foreach=True),
    "Adam fused": lambda p: optim.Adam(p, lr=0.05, weight_decay=0.1, fused=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.05),
    "AdamW amsgrad": lambda p: optim.AdamW(p, lr=0.05, weight_decay=0.1, amsgrad=True, maximize=True),
    "NAdam": lambda p: optim.NAdam(p, lr=0.05),
    "NAdam decay": lambda p: optim.NAdam(p, lr=0.05, weight_decay=0.1, momentum_decay=0.01, maximize=True),
    "NAdam decoupled": lambda p: optim.NAdam(p, lr=0.05, weight_decay=0.1, decoupled_weight_decay=True, foreach=True),
    "RAdam": lambda p: optim.RAdam(p, lr=0.05),
    "RAdam decay": lambda p: optim.RAdam(p, lr=0.05, weight_decay=0.1, betas=(0.8, 0.9), maximize=True),
    "RAdam decoupled": lambda p: optim.RAdam(p, lr=0.05, weight_decay=0.1, decoupled_weight_decay=True, foreach=True),
    "RAdam never": lambda p: optim.RAdam(p, lr=0.05, betas=(0.8, 0.6)),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05),
    "Adagrad decay": lambda p: optim.Adagrad(p, 0.05, 0.1, weight_decay=0.1, initial_accumulator_value=0.2, maximize=True),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "Adadelta decay": lambda p: optim.Adadelta(p, lr=0.5, rho=0.8, weight_decay=0.1, maximize=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.05),
    "RMSprop decay": lambda p: optim.RMSprop(p, lr=0.05, weight_decay=0.1, maximize=True),
    "RMSprop centered": lambda p: optim.RMSprop(p, lr=0.05, centered=True, eps=1e-2),
    "RMSprop momentum": lambda p: optim.RMSprop(p, lr=0.05, momentum=0.9, centered=True, weight_decay=0.1, eps=1e-2),
    "Adamax": lambda p: optim.Adamax(p, lr=0.05),
    "Adamax decay": lambda p: optim.Adamax(p, lr=0.05, weight_decay=0.1, maximize=True),
    "ASGD": lambda p: optim.ASGD(p, lr=0.05, lambd=0.01, t0=20, weight_decay=0.1, maximize=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.05, etas=(0.4, 1.3), step_sizes=(1e-3, 0.2), maximize=True),
}


def grouped(model: Torch) -> optim.Optimizer:
    """A group for most, one with other options, one parameter alone; `e` is nobody's."""
    return optim.AdamW(
        [
            {"params": [model.b, model.d]},
            {"params": [model.a], "lr": 0.2, "weight_decay": 0.0, "amsgrad": True, "maximize": True},
            {"params": [model.c], "betas": (0.5, 0.8), "eps": 1e-3},
        ],
        lr=0.05,
        weight_decay=0.3,
    )


class TorchNet(nn.Module):
    """Transposed, split and tied arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 5)


class FlaxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(7, 6, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(6, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.out = nnx.Linear(6, 5, rngs=rngs)


def nets() -> tuple[TorchNet, FlaxNet, optim.Optimizer]:
    torch.manual_seed(0)
    ours, theirs = TorchNet(), FlaxNet(nnx.Rngs(0))
    decayed = [p for p in ours.parameters() if p.ndim > 1]
    others = [p for p in ours.parameters() if p.ndim == 1]
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    optimizer = optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.02}], lr=0.01, weight_decay=0.2
    )
    parity.transfer(ours, theirs)
    return ours, theirs, optimizer
