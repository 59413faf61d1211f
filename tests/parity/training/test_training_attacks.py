"""What people give a training comparison that cannot be trained, and what looks wrong only at second sight."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx
from helpers import random
from torch import nn, optim
from torch.optim import lr_scheduler as lrs

import parity
from parity import Recipe

X = random("training attacks").standard_normal((5, 3)).astype(np.float32)
Y = random("training attacks' targets").standard_normal((5, 2)).astype(np.float32)
BATCHES = [(X, Y)] * 2
ADAM = (optim.Adam, dict(lr=0.01))


class Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.b(torch.tanh(self.a(x)))


class Theirs(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.b(jnp.tanh(self.a(x)))


def moved(ours: nn.Module, theirs: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for p in ours.parameters():
            p.copy_(0.5 * torch.randn_like(p))
    return ours, parity.transfer(ours, theirs).value or theirs


def trained(optimizer: Any = ADAM, batches: Any = BATCHES, loss: Any = "mse", models: Any = None, **options: Any) -> Any:
    return parity.train_both(*(models or moved(Ours(), Theirs())), optimizer, batches, loss, **options)


def losses(torchs: Any, flaxs: Any = None) -> Any:
    return torchs, flaxs or (lambda model, x, y: jnp.square(model(x) - y).mean())


class Own(optim.SGD):
    """A user's own."""


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model's parameters": (
        dict(optimizer=optim.Adam(Ours().parameters())),
        r"the optimizer moves what is no parameter of torch_model; .*\n.*parameter 0 of group 0, shape \(4, 3\)",
    ),
    "a closure": (
        dict(optimizer=optim.LBFGS, recipe=Recipe(transformation=optax.sgd(0.1))),
        "LBFGS calls the loss by a closure, .* these have a twin in optax: Adam, AdamW",
    ),
    "an optimizer of one's own": (dict(optimizer=Own), "Own is none of torch.optim's Adam, .*; use one of these itself"),
    "a scheduler that is none": (dict(recipe=Recipe(scheduler=3)), "recipe.scheduler must be a scheduler of .* got 3"),
    "plateau": (dict(recipe=Recipe(scheduler=lrs.ReduceLROnPlateau)), "ReduceLROnPlateau sets the rate by a metric"),
    "torch's loss has axes": (
        dict(loss=losses(lambda model, x, y: (model(x) - y) ** 2)),
        r"torch's loss must return one real number, got shape \(5, 2\) of float64; take its mean",
    ),
    "Flax's loss has axes": (
        dict(loss=losses(lambda model, x, y: (model(x) - y).square().mean(), lambda model, x, y: model(x) - y)),
        r"Flax's loss must return one real number, got shape \(5, 2\) of float64; take its mean",
    ),
    "torch's loss is a tuple": (
        dict(loss=losses(lambda model, x, y: ((model(x) - y).square().mean(), 0))),
        "torch's loss must return a tensor without axes, got tuple; return the loss alone",
    ),
    "Flax's loss is a tuple": (
        dict(loss=losses(lambda model, x, y: model(x).mean(), lambda model, x, y: (model(x).mean(), 0))),
        "Flax's loss must return an array without axes, got tuple; return the loss alone",
    ),
    "a loss that is detached": (
        dict(loss=losses(lambda model, x, y: model(x).mean().detach())),
        "torch's loss does not depend on any parameter that needs a gradient",
    ),
    "NaN from the start": (
        dict(batches=[(X * np.nan, Y)]),
        "the loss is nan in torch and nan in Flax in the first step already",
    ),
    "a number for batches": (dict(batches=4), "batches must be an iterable of batches, each a tuple of arrays, got int"),
    "bare arrays": (dict(batches=[X, X]), r"(?s)2 problems.*batch 1 is numpy.ndarray; put it into a tuple, as in \(batch,\)"),
    "too few batches": (dict(recipe=Recipe(accumulate=3)), "batches holds 2, and one step takes 3: no step would be taken"),
    "a bound below 0": (dict(allowed=-1.0), "allowed must be a number above 0, a part of an array's largest value, got -1.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(name):
    options, message = REFUSED[name]
    with pytest.raises(parity.InputError, match=message):
        trained(**options)


def test_more_steps_than_there_is_memory_for_are_refused():
    with pytest.raises(parity.InputError, match=r"steps must be at most 1,000,000, got 1,000,000,000,000: every step is kept"):
        parity.compare(*moved(Ours(), Theirs()), X, steps=10**12, optimizer=ADAM, loss="square")


def test_float16_parameters_have_no_scaler():
    with pytest.raises(parity.InputError, match="GradScaler takes no gradients of float16 parameters; keep them in float32"):
        trained(models=(Ours().half(), Theirs()), recipe=Recipe(scaler={}))


def test_a_loss_that_is_no_number_later_is_noted_and_one_sided_told():
    found = trained(batches=[(X, Y), (X * np.nan, Y)])
    assert found.passed and "in step 2 the loss is no number on either side" in str(found)
    found = trained(loss=losses(lambda m, x, y: (m(x) - y).square().mean(), lambda m, x, y: m(x).mean() * jnp.nan))
    assert not found.passed and "in torch and nan in Flax" in str(found)


def test_a_generator_is_read_to_its_end_and_what_makes_no_step_is_noted():
    found = trained(batches=(batch for batch in BATCHES[:1] * 3), recipe=Recipe(accumulate=2))
    assert found.passed and len(found.drift) == 1
    assert "note: the last 1 of 3 batches make no whole step" in str(found)


def test_a_scheduler_without_formula_is_rehearsed_for_the_steps_that_are_taken():
    recipe = Recipe(scheduler=(lrs.LambdaLR, dict(lr_lambda=lambda count: 1 / (1 + count))))
    sgd = (optim.SGD, dict(lr=0.1))
    found = trained(sgd, recipe=recipe, batches=BATCHES * 2, native=True)
    assert found.passed and len(found.drift) == len(found.native) == 4
    # The rate moved: without it the run is another.
    assert trained(sgd, batches=BATCHES * 2).drift[3].loss != found.drift[3].loss
    still = Recipe(scheduler=recipe.scheduler, transformation=optax.sgd(0.1))
    assert "The learning rate stays as it is" in str(trained(sgd, recipe=still, batches=BATCHES * 2))


def test_gradients_of_looked_up_rows_alone_are_compared():
    ours, theirs = moved(nn.Sequential(nn.Embedding(7, 3, sparse=True)), nnx.Sequential(nnx.Embed(7, 3, rngs=nnx.Rngs(0))))
    rows = [(np.array([[1, 2], [1, 5]]),)] * 3
    found = trained((optim.SGD, dict(lr=0.1)), rows, "square", (ours, theirs))
    assert found.passed and found.drift[0].loss > found.drift[2].loss


class Sometimes(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.ones(2))

    def forward(self, x: Any) -> Any:
        return super().forward(x) * (self.c if len(x) == 4 else 1)


class FlaxSometimes(Theirs):
    def __init__(self) -> None:
        super().__init__()
        self.c = nnx.Param(jnp.ones(2))

    def __call__(self, x: Any) -> Any:
        return super().__call__(x) * (self.c[...] if len(x) == 4 else 1)


def test_a_parameter_with_a_gradient_in_some_steps_only_is_told():
    models = moved(Sometimes(), FlaxSometimes())
    found = trained(batches=[(X, Y), (X[:4], Y[:4])], models=models, native=True)
    assert found.first == 2 and found.parted == ("c",) and not found.native
    assert "step 2: c gets a gradient in torch, and got none before" in str(found) and "add 0 * p.sum()" in str(found)


class Norms(nn.Module):
    """Two dropouts and a norm over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.b, self.end = nn.Linear(4, 2), nn.Dropout(0.2)

    def forward(self, x: Any) -> Any:
        return self.end(self.b(self.drop(torch.tanh(self.norm(self.a(x))))))


class FlaxNorms(nnx.Module):
    def __init__(self, fault: str = "") -> None:
        rngs, self.fault = nnx.Rngs(0), fault
        self.a, self.b = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.drop, self.end = nnx.Dropout(0.3, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.a(x)
        y = self.norm(x)
        if self.fault == "statistics" and not self.norm.use_running_average:
            unit = (x - x.mean(0)) / jnp.sqrt(x.var(0, ddof=1) + 1e-5)
            y = unit * self.norm.scale[...] + self.norm.bias[...]
        y = jnp.tanh(self.drop(y)) if self.fault == "place" else self.drop(jnp.tanh(y))
        return self.end(self.b(y))


class LinenNorms(linen.Module):
    @linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = linen.Dense(4, name="a")(x)
        options: Any = dict(momentum=0.9, epsilon=1e-5, use_fast_variance=False, name="norm")
        x = linen.BatchNorm(use_running_average=not train, **options)(x)
        x = jnp.tanh(linen.Dropout(0.3, deterministic=not train, name="drop")(x))
        return linen.Dropout(0.2, deterministic=not train, name="end")(linen.Dense(2, name="b")(x))


def test_dropout_at_another_place_is_named_and_none_that_is_right():
    found = trained(models=moved(Norms(), FlaxNorms("place")), batches=BATCHES[:1], recipe=Recipe(train=True, mode="eager"))
    (cause,) = found.causes
    assert cause.hypothesis == "place of dropout" and "Dropout at drop is applied to another value" in cause.what
    assert cause.before > 1e6 and cause.after <= 1


@pytest.mark.slow
def test_dropout_at_another_place_is_named_in_linen_too():
    theirs = parity.Linen(LinenNorms(), None, X, train=False, rngs={"dropout": jax.random.key(0)})
    found = trained(models=moved(Norms(), theirs), batches=BATCHES[:1], recipe=Recipe(train=True, mode="eager"))
    assert [cause.what.split(" is ")[0] for cause in found.causes] == ["Dropout at drop"]


@pytest.mark.slow
def test_statistics_of_the_batch_are_told_from_dropout():
    found = trained(
        models=moved(Norms(), FlaxNorms("statistics")), batches=BATCHES[:1], recipe=Recipe(train=True, mode="eager")
    )
    (cause,) = found.causes
    assert cause.hypothesis == "train mode" and "dropout left out or not: the statistics of the batch" in cause.what


@pytest.mark.slow
def test_a_biased_running_variance_is_named_where_batches_are_accumulated():
    found = trained(models=moved(Norms(), FlaxNorms()), batches=BATCHES, recipe=Recipe(train=True, accumulate=2))
    assert found.parted == ("norm.running_var",) and "divided by n, not by n - 1" in found.causes[0].what
    assert "with n = 5" in found.causes[0].what


def test_a_group_that_is_added_later_begins_there():
    ours, theirs = moved(Ours(), Theirs())
    optimizer = optim.AdamW(ours.a.parameters(), lr=0.01)
    for _ in range(3):
        ours(torch.tensor(X)).square().mean().backward()
        optimizer.step()
    optimizer.add_param_group(dict(params=ours.b.parameters(), lr=0.05))
    parity.transfer(ours, theirs)
    found = trained(optimizer, BATCHES * 2, models=(ours, theirs), native=True)
    assert found.passed and max(drift.values for drift in found.drift) < 1e-13
    state = parity.to_optax(optimizer, ours, theirs).init(nnx.state(theirs, nnx.Param))
    assert parity.transfer_optimizer(optimizer, state, ours, theirs).steps == (3, 0)
