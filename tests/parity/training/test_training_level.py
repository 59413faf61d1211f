"""`compare(..., steps=N)`: both models train, with dropout, loss scales and accumulation; what parts is named."""

import json
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

import parity
from parity import Recipe
from parity.frameworks import load

ADAMW = (optim.AdamW, dict(lr=0.02))
X, Y = random("training level").standard_normal((2, 6, 5, 3)).astype(np.float32)
BATCHES = [(X[:3], Y[:3]), (X[3:], Y[3:])]


class Ours(nn.Module):
    """Dropout behind a hidden layer and behind the last; a norm that shifted rows are hard for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(3, 4), nn.Dropout(0.3)
        self.norm, self.last, self.end = nn.LayerNorm(4), nn.Linear(4, 3), nn.Dropout(0.2)

    def forward(self, x: Any) -> Any:
        return self.end(self.last(self.norm(x.mean() + self.drop(torch.tanh(self.first(x))))))


class Unscaled(nnx.Dropout):
    """Forgets to divide by the share that is kept."""

    def __call__(self, x: Any, **_: Any) -> Any:
        if self.deterministic:
            return x
        return jnp.where(jax.random.bernoulli(self.rngs(), 1 - self.rate, x.shape), x, 0)


class Theirs(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: Any = nnx.Dropout, early: bool = False, fast: bool = False, **options: Any):
        self.early = early
        self.first, self.drop = nnx.Linear(3, 4, rngs=rngs), dropout(0.3, rngs=rngs, **options)
        self.norm = nnx.LayerNorm(4, epsilon=1e-5, use_fast_variance=fast, rngs=rngs)
        self.last, self.end = nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        hidden = self.first(x)
        hidden = jnp.tanh(self.drop(hidden)) if self.early else self.drop(jnp.tanh(hidden))
        return self.end(self.last(self.norm(x.mean() + hidden)))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = linen.Dropout(0.3, name="drop")(jnp.tanh(linen.Dense(4, name="first")(x)), deterministic=not train) + x.mean()
        x = linen.LayerNorm(epsilon=1e-5, use_fast_variance=False, name="norm")(x)
        return linen.Dropout(0.2, name="end")(linen.Dense(3, name="last")(x), deterministic=not train)


def models(**options: Any) -> tuple[Ours, Theirs]:
    torch.manual_seed(1)
    ours, theirs = Ours().eval(), Theirs(nnx.Rngs(0), **options)
    theirs.eval()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.2 * torch.randn_like(p))
    parity.transfer(ours, theirs)
    return ours, theirs


def both(recipe: Recipe | None = None, steps: int = 2, **options: Any) -> Any:
    ours, theirs = models(**options)
    asked: dict[str, Any] = dict(levels=["weights", "training"], optimizer=ADAMW, loss="mse", batches=BATCHES, recipe=recipe)
    return parity.compare(ours, theirs, X, steps=steps, **asked)


def test_the_level_trains_both_with_dropout_and_keeps_the_drift():
    report = both(steps=3)
    assert report.passed and [level.level for level in report.levels] == ["weights", "training"]
    found = report.training
    assert [drift.step for drift in found.drift] == [1, 2, 3] and max(d.values for d in found.drift) < 1e-13
    assert len({drift.loss for drift in found.drift}) == 3 and len(found.native) == 3
    assert all(0 < step.ratio <= 1 and not step.kinks for step in found.native)
    assert report.level("training").figures["steps"] == 3
    assert "the same training: 3 steps in float64" in str(found) and "natively from torch's state each" in str(found)
    assert json.loads(json.dumps(report.to_dict()))["training"]["drift"][2]["step"] == 3


def test_linen_is_told_to_train_by_its_keywords():
    ours, _ = models()
    theirs = parity.Linen(Linen(), None, X, train=False, rngs={"dropout": jax.random.key(0)})
    theirs = parity.transfer(ours, theirs).value
    options: dict[str, Any] = dict(optimizer=ADAMW, loss="square", levels=["training"], steps=2)
    report = parity.compare(ours, theirs, X, recipe=Recipe(max_norm=0.1), **options)
    assert report.passed and report.training.drift[0].loss != report.training.drift[1].loss, str(report)


DROPOUT = {
    "broadcast": (dict(broadcast_dims=(0,)), ["broadcast", "(1, 5, 4)"]),
    "unscaled": (dict(dropout=Unscaled), ["drop does not scale what it keeps"]),
}


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_that_is_not_torchs_is_named(name):
    options, says = DROPOUT[name]
    report = both(**options)
    finding = report.level("training").findings[0]
    assert not report.passed and all(word in str(finding) for word in says), str(report)
    assert "NOT the same training" in str(report.training)


def test_dropout_at_the_wrong_place_is_seen_in_the_first_gradients():
    report = both(early=True)
    assert report.training.first == 1 and report.training.drift[0].gradients > 1e-3
    assert "first.bias" in report.training.parted
    assert "the models differ" in str(report) and "dropout" in str(report)


def test_digits_that_the_deployed_dtype_loses_are_seen_in_a_step_by_itself():
    ours, theirs = models(fast=True)
    batches = [(X + 200, Y)]
    found = parity.train_both(ours, theirs, ADAMW, batches, "mse", native=True, recipe=Recipe(train=True), allowed=1e-6)
    assert found.first is None and not found.passed and found.imprecise.step == 1 and found.imprecise.ratio > 3
    assert "step 1, in the dtype of the models from torch's state" in str(found) and "digits are lost" in str(found)


class Statistics(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, momentum: float, factor: float):
        self.norm, self.factor = nnx.BatchNorm(3, momentum=momentum, epsilon=1e-5, use_fast_variance=False, rngs=rngs), factor

    def __call__(self, x: Any) -> Any:
        before = self.norm.var[...]
        result = self.norm(x)
        if not self.norm.use_running_average:
            kept = self.norm.momentum
            self.norm.var[...] = kept * before + self.factor * (self.norm.var[...] - kept * before)
        return result


@pytest.mark.parametrize(
    ("momentum", "factor", "cause"),
    [
        (0.9, 15 / 14, ""),
        (0.9, 1.0, "running variance"),
        (0.1, 15 / 14, "momentum of statistics"),
        (0.1, 1.0, "momentum of statistics, running variance and momentum of statistics"),
    ],
)
def test_running_statistics_are_compared_and_what_is_wrong_with_them_named(momentum, factor, cause):
    mode: Any = "eager" if factor == 1.0 else "compiled"
    ours = nn.Sequential()
    ours.add_module("norm", nn.BatchNorm1d(3))
    theirs = Statistics(nnx.Rngs(0), momentum, factor)
    parity.transfer(ours, theirs)
    losses = (lambda model, x, y: (model(x) - y).square().mean(), lambda model, x, y: jnp.square(model(x) - y).mean())
    batch = (X.reshape(-1, 3)[:15], Y.reshape(-1, 3)[:15])
    found = parity.train_both(ours, theirs, (optim.SGD, dict(lr=0.1)), [batch], losses, recipe=Recipe(train=True, mode=mode))
    assert found.passed == (not cause) and found.mode == mode, str(found)
    assert ", ".join(sorted(one.hypothesis for one in found.causes)) == cause
    assert ("with n = 15" in str(found)) == (factor == 1.0)
    assert (found.drift[0].buffers > 1e-3) == bool(cause)


def test_a_loss_scale_grows_shrinks_and_skips_as_torchs_does():
    ours, theirs = models()
    bad = X[:3].copy()
    bad[0, 0, 0] = np.inf
    batches = [*BATCHES, (bad, Y[:3]), *BATCHES]
    recipe = Recipe(
        scaler=dict(init_scale=2.0**10, growth_interval=2), scheduler=lambda o: optim.lr_scheduler.ExponentialLR(o, 0.5)
    )
    found = parity.train_both(ours, theirs, ADAMW, batches, "mse", recipe=recipe, native=True)
    assert found.passed, str(found)
    assert [drift.scale for drift in found.drift] == [2.0**10, 2.0**10, 2.0**11, 2.0**10, 2.0**10]
    assert [drift.skipped for drift in found.drift] == [False, False, True, False, False]
    assert "1 skipped by the loss scale" in str(found)
    # A port that does not skip.
    plain = Recipe(scaler=recipe.scaler, transformation=NeverSkips(), train=False)
    found = parity.train_both(ours, theirs, ADAMW, batches[:3], "mse", recipe=plain)
    assert found.first == 3 and "step 3: torch skips it" in str(found)


def test_the_twin_of_a_scaler_takes_its_steps_in_a_loop_of_ones_own():
    ours, _ = models()
    scaler = dict(init_scale=4.0, growth_interval=1)
    tx = parity.to_optax(optim.SGD(ours.parameters(), lr=0.5), scaler=scaler)
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    scales, values = [], []
    for gradient in (1.0, jnp.nan, 1.0):
        scales.append(float(parity.loss_scale(state)))
        updates, state = tx.update({"w": gradient * parity.loss_scale(state) * jnp.ones(2)}, state, params)
        params = optax.apply_updates(params, updates)
        values.append(float(params["w"][0]))
    assert scales == [4.0, 8.0, 4.0] and values == [0.5, 0.5, 0.0]
    assert float(parity.loss_scale(optax.sgd(0.1).init(params))) == 1.0


def NeverSkips() -> Any:
    room = load("optax")
    scaled = room.scaled(optax.adamw(0.02, weight_decay=0.01), 2.0**10, 2.0, 0.5, 2)

    def update(g: Any, state: Any, params: Any = None) -> Any:
        updates, new = scaled.update(g, state, params)
        return jax.tree.map(lambda u: jnp.where(new.skipped, 0.1, u), updates), new._replace(skipped=jnp.asarray(False))

    return optax.GradientTransformation(scaled.init, update)


def test_accumulated_batches_make_one_step_and_optax_may_count_them_itself():
    ours, theirs = models()
    sgd = (optim.SGD, dict(lr=0.02, momentum=0.9))
    recipe = Recipe(accumulate=2, transformation=optax.MultiSteps(optax.sgd(0.02, momentum=0.9), 2))
    for one in (recipe, Recipe(accumulate=2, max_value=0.01)):
        found = parity.train_both(ours, theirs, sgd, BATCHES * 2, "mse", recipe=one)
        assert found.passed and len(found.drift) == 2, str(found)


def test_a_fault_of_the_port_is_named_in_the_report():
    report = both(Recipe(transformation=optax.adamw(0.02)), steps=1)
    assert [finding.where for finding in report.level("training").findings] == ["", "cause"]
    assert "the default of optax.adamw" in str(report) and report.training.mode == "compiled"
    with pytest.raises(parity.DivergenceError, match="cause: weight decay"):
        report.raise_for_divergence()


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no loss": (dict(steps=2, optimizer=ADAMW), "steps=2 needs loss too"),
    "nothing": (dict(steps=2), "needs optimizer and loss too"),
    "no steps": (dict(optimizer=ADAMW), "optimizer without steps does nothing; pass steps=N too"),
    "bad steps": (dict(steps=-1), "steps must be a whole number of at least 0, got -1"),
    "level alone": (dict(levels=["training"]), "the level training needs steps=N, optimizer=... and loss=..."),
    "loss": (dict(steps=1, optimizer=ADAMW, loss="hinge"), r"one of 'cross_entropy', 'mse', 'l1', 'square'; got 'hinge'"),
    "optimizer": (dict(steps=1, optimizer=3, loss="mse"), "optimizer must be a torch.optim.Optimizer of the torch model"),
    "recipe": (dict(steps=1, optimizer=ADAMW, loss="mse", recipe={}), "recipe must be a parity.Recipe, got {}"),
    "no batches": (dict(steps=1, optimizer=ADAMW, loss="mse", batches=[]), "batches is empty: there is nothing to train on"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_trained_is_refused(name):
    options, message = ERRORS[name]
    with pytest.raises(parity.InputError, match=message.replace("(", r"\(")):
        parity.compare(*models(), X, **options)


RECIPES: dict[str, tuple[dict[str, Any], str]] = {
    "every": (dict(every=0), "every must be a whole number of at least 1, got 0"),
    "norm": (dict(max_norm=0), "max_norm must be a number above 0, got 0"),
    "two": (dict(max_norm=1.0, max_value=1.0), "two ways to clip; give one"),
    "state": (dict(state=1), "state belongs to a transformation; give that too"),
    "transformation": (dict(transformation=0.1), "transformation must be one of optax, got 0.1"),
    "mode": (dict(mode="jit"), "mode must be 'compiled' or 'eager', got 'jit'"),
    "scaler": (dict(scaler=2.0), "scaler must be a torch.amp.GradScaler or a dict of its options, got 2.0"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_makes_no_sense_is_refused(name):
    options, message = RECIPES[name]
    with pytest.raises(parity.InputError, match=message):
        Recipe(**options)


def test_a_scaler_that_is_off_and_a_flax_model_that_is_none_are_refused():
    ours, theirs = models()
    off = Recipe(scaler=torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(parity.InputError, match="the scaler is not enabled"):
        parity.train_both(ours, theirs, ADAMW, BATCHES, "mse", recipe=off)
    with pytest.raises(parity.InputError, match=r"must be a flax.nnx.Module or a parity.Linen, got"):
        parity.train_both(ours, ours, ADAMW, BATCHES, "mse")
    with pytest.raises(parity.InputError, match=r"first model must be a torch.nn.Module, got"):
        parity.train_both(theirs, theirs, ADAMW, BATCHES, "mse")
