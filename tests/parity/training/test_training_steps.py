"""Both models trained side by side: together to the end, or parted where a fault was planted."""

import copy
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
from torch.nn import functional as F
from torch.optim import lr_scheduler as lrs

import parity
from parity.training.recipe import Recipe
from parity.training.steps import Training, train_both


class Ours(nn.Module):
    """Attention, a norm and a batch norm in train mode, an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.batch = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 5)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Any) -> Any:
        hidden = self.embed(x)
        hidden = self.norm(hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]).mean(1)
        return self.out(self.batch(hidden))


class Theirs(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, epsilon: float = 1e-5) -> None:
        self.embed = nnx.Embed(7, 6, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(6, epsilon=epsilon, use_fast_variance=False, rngs=rngs)
        self.batch = nnx.BatchNorm(6, momentum=0.9, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.out = nnx.Linear(6, 5, rngs=rngs)
        self.idle = nnx.Param(jnp.zeros(3))

    def __call__(self, x: Any) -> Any:
        hidden = self.embed(x)
        hidden = self.norm(hidden + self.attention(hidden)).mean(1)
        return self.out(self.batch(hidden))


LOSS = (
    lambda model, x, y: F.cross_entropy(model(x), y),
    lambda model, x, y: optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean(),
)


def models(**options: Any) -> tuple[Ours, Theirs]:
    torch.manual_seed(0)
    ours, theirs = Ours(), Theirs(nnx.Rngs(0), **options)
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.1 * torch.randn_like(p))
    # torch's running variance is unbiased, Flax's is not: both stay as they are in eval mode.
    ours.batch.eval()
    theirs.batch.use_running_average = True
    parity.transfer(ours, theirs)
    return ours, theirs


def batches(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = random("training batches")
    return [(rng.integers(0, 7, (4, 3)), rng.integers(0, 5, 4)) for _ in range(steps)]


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    )


def test_forty_steps_stay_together_and_nothing_of_the_callers_moves():
    ours, theirs = models()
    optimizer = adamw(ours)
    scheduler = lrs.CosineAnnealingLR(optimizer, 30)
    before = copy.deepcopy(ours.state_dict()), jax.tree.map(jnp.copy, nnx.state(theirs))
    found = train_both(ours, theirs, optimizer, batches(40), LOSS, recipe=Recipe(scheduler=scheduler, max_norm=0.5))
    assert found.passed and len(found.drift) == 40
    assert max(drift.values for drift in found.drift) < 1e-11
    # A key bias changes no attention; the parameter that is not used has no gradient at all.
    assert [name for name, _ in found.noise] == ["attention.in_proj_bias"] and found.unused == ("idle",)
    assert "gradient is rounding alone, not compared: attention.in_proj_bias (6)" in str(found)
    assert str(found).startswith("the same training: 40 steps in float64, largest difference ")
    assert found.to_dict()["passed"] is True
    found.raise_for_divergence()
    assert all(torch.equal(value, before[0][name]) for name, value in ours.state_dict().items())
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), before[1], nnx.state(theirs)))
    assert not optimizer.state and scheduler.last_epoch == 0


def test_a_run_that_has_begun_goes_on():
    ours, theirs = models()
    optimizer = adamw(ours)
    for x, y in batches(5):
        optimizer.zero_grad()
        LOSS[0](ours, torch.tensor(x), torch.tensor(y)).backward()
        optimizer.step()
    parity.transfer(ours, theirs)
    ours.idle.requires_grad_(False)
    assert train_both(ours, theirs, optimizer, batches(10), LOSS).passed


def twin(optimizer: optim.Optimizer, ours: nn.Module, theirs: nnx.Module) -> Any:
    return parity.to_optax(optimizer, ours, theirs, unused="idle")


NAMED = {"decay default": "weight decay", "decay of norms and biases": "weight decay", "rate": "learning rate"}
FAULTS: dict[str, Any] = {
    "decay default": lambda o, m, f: optax.adamw(0.01),
    "decay of norms and biases": lambda o, m, f: parity.to_optax(optim.AdamW(m.parameters(), lr=0.01), m, f, unused="idle"),
    "coupled decay": lambda o, m, f: parity.to_optax(
        optim.Adam(m.parameters(), lr=0.01, weight_decay=0.01), m, f, unused="idle"
    ),
    "rate": lambda o, m, f: optax.chain(twin(o, m, f), optax.scale(1.001)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_optimizer_is_seen_in_the_first_step_and_the_gradients_are_cleared(name):
    ours, theirs = models()
    optimizer = adamw(ours)
    found = train_both(
        ours, theirs, optimizer, batches(2), LOSS, recipe=Recipe(transformation=FAULTS[name](optimizer, ours, theirs))
    )
    assert not found.passed and found.first == 1 and found.drift[0].gradients < 1e-12
    assert not NAMED.get(name) or found.causes[0].hypothesis == NAMED[name], [cause.what for cause in found.causes]
    assert "step 1: " in str(found) and "the optimizer or a running statistic takes another step" in str(found)
    with pytest.raises(parity.DivergenceError, match="NOT the same training"):
        found.raise_for_divergence()


def test_a_schedule_that_is_off_by_one_parts_in_the_step_that_it_concerns():
    ours, theirs = models()
    optimizer = adamw(ours)
    scheduler = lrs.StepLR(optimizer, 3)
    late = [parity.to_optax(optim.AdamW(ours.parameters(), lr=1.0, weight_decay=0.0), ours, theirs, unused="idle")]
    late += [optax.scale_by_schedule(lambda count: jnp.where(count < 4, 0.01, 0.001))]
    plain = optim.AdamW(ours.parameters(), lr=0.01, weight_decay=0.0)
    scheduler = lrs.StepLR(plain, 3)
    found = train_both(
        ours, theirs, plain, batches(6), LOSS, recipe=Recipe(scheduler=scheduler, transformation=optax.chain(*late))
    )
    assert found.first == 4


def test_a_fault_of_the_model_is_told_from_one_of_the_optimizer():
    ours, theirs = models(epsilon=1e-6)
    found = train_both(ours, theirs, adamw(ours), batches(2), LOSS)
    assert found.first == 1 and found.drift[0].gradients > 1e-8
    assert "step 1: gradients of " in str(found) and "the models differ" in str(found)


def test_a_running_variance_that_is_biased_is_named():
    ours, theirs = models()
    ours.batch.train()
    theirs.batch.use_running_average = False
    found = train_both(ours, theirs, adamw(ours), batches(1), LOSS)
    assert found.first == 1 and found.parted == ("batch.running_var",)


def test_a_row_that_torch_gives_no_gradient_is_seen():
    ours, theirs = models()
    ours.embed.padding_idx = 0
    found = train_both(ours, theirs, adamw(ours), batches(2), LOSS)
    assert found.first == 1 and found.parted == ("embed.weight",)


def test_models_that_start_apart_are_refused():
    ours, theirs = models()
    theirs.out.bias[...] += 1
    with pytest.raises(parity.InputError, match=r"out.bias differs before the first step; parity.transfer"):
        train_both(ours, theirs, adamw(ours), batches(1), LOSS)


def test_no_batches_and_no_optimizer():
    ours, theirs = models()
    with pytest.raises(parity.InputError, match="batches holds 0, and one step takes 1: no step would be taken"):
        train_both(ours, theirs, adamw(ours), [], LOSS)
    with pytest.raises(parity.InputError, match="third argument must be the torch optimizer"):
        train_both(ours, theirs, lrs.StepLR(adamw(ours), 2), batches(1), LOSS)
    assert not Training((), 1e-10).passed and str(Training((), 1e-10)) == "no step was taken"
