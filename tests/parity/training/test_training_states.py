"""A run that goes on in the other framework is the run that it would have been."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from flax import nnx
from torch.optim import lr_scheduler as lrs
from training_helpers import MAKE, Flax, Torch, flax_run, gradients, grouped, nets, parted, start, torch_run

import parity
from parity.frameworks import load

# One of each state; SGD counts nothing, so that its scheduler, or the caller, says how far the run is.
RESUMED = [
    "SGD",
    "SGD nesterov",
    "SGD dampening",
    "Adam decay",
    "AdamW amsgrad",
    "NAdam decay",
    "RAdam decay",
    "Adagrad decay",
    "Adadelta decay",
    "RMSprop momentum",
    "Adamax decay",
    "ASGD",
    "Rprop",
]


def half(grads: dict, which: int) -> dict:
    return {name: g[50 * which : 50 * which + 50] for name, g in grads.items()}


def last(found: dict) -> dict:
    return {name: values[-1] for name, values in found.items()}


def schedule(optimizer: Any) -> Any:
    return lrs.CosineAnnealingLR(optimizer, 130)


@pytest.mark.parametrize("name", RESUMED)
def test_fifty_steps_in_each_are_a_hundred_in_either(name):
    with jax.enable_x64(True):
        grads = gradients(100)
        whole = Torch(start())
        optimizer = MAKE[name](whole.parameters())
        expected = torch_run(optimizer, whole, grads, schedule(optimizer).step)

        # torch, then optax
        model = Torch(start())
        optimizer = MAKE[name](model.parameters())
        scheduler = schedule(optimizer)
        flax = Flax(start())
        tx = parity.to_optax(optimizer, scheduler=scheduler)
        params = last(torch_run(optimizer, model, half(grads, 0), scheduler.step))
        told = parity.transfer_optimizer(optimizer, tx.init(params), model, flax, scheduler=scheduler)
        actual, _ = flax_run(tx, params, half(grads, 1), told.value)
        assert parted(actual, {n: values[50:] for n, values in expected.items()}) < 1e-13
        assert set(told.steps) <= {50, None}

        # optax, then torch
        other = Torch(start())
        again = MAKE[name](other.parameters())
        following = schedule(again)
        tx = parity.to_optax(again, scheduler=following)
        found, state = flax_run(tx, start(), half(grads, 0))
        for parameter, values in zip(other.parameters(), last(found).values(), strict=True):
            parameter.data = torch.tensor(values)
        parity.transfer_optimizer(state, again, other, flax, scheduler=following)
        assert following.last_epoch == 50
        actual = torch_run(again, other, half(grads, 1), following.step)
        assert parted(actual, {n: values[50:] for n, values in expected.items()}) < 1e-13


@pytest.mark.parametrize("name", ["Adam decay", "NAdam decay", "SGD dampening"])
def test_a_count_that_begins_anew_is_seen(name):
    with jax.enable_x64(True):
        model, flax, grads = Torch(start()), Flax(start()), gradients(100)
        optimizer = MAKE[name](model.parameters())
        tx = parity.to_optax(optimizer)
        params = last(torch_run(optimizer, model, half(grads, 0)))
        state = parity.transfer_optimizer(optimizer, tx.init(params), model, flax, step=50).value
        expected = torch_run(optimizer, model, half(grads, 1))
        reset = jax.tree.map(lambda leaf: leaf * 0 if leaf.dtype == jnp.int32 else leaf, state)
        assert parted(flax_run(tx, params, half(grads, 1), state)[0], expected) < 1e-13
        assert parted(flax_run(tx, params, half(grads, 1), reset)[0], expected) > 1e-6


def test_every_layout_arrives_and_comes_back_bit_for_bit_through_nnx_optimizer():
    ours, theirs, optimizer = nets()
    x = torch.randint(0, 7, (3, 4))
    for _ in range(3):
        optimizer.zero_grad()
        hidden = ours.embed(x)
        ours.out(ours.norm(ours.attention(hidden, hidden, hidden)[0])).square().sum().backward()
        optimizer.step()
    trained = nnx.Optimizer(theirs, parity.to_optax(optimizer, ours, theirs), wrt=nnx.Param)
    told = parity.transfer_optimizer(optimizer, trained, ours, theirs)
    assert told.value is trained and told.steps == (3, 3) and int(trained.step[...]) == 3
    assert len(told.arrays) == 2 * len(list(ours.parameters()))
    state = trained.opt_state.inner_states["torch group 0"].inner_state[0].tensors
    exp_avg = optimizer.state[ours.out.weight]["exp_avg"].numpy()
    assert (state["exp_avg"]["out"]["kernel"][...] == exp_avg.T).all()
    query = optimizer.state[ours.attention.in_proj_weight]["exp_avg_sq"].numpy()[:6]
    assert (state["exp_avg_sq"]["attention"]["query"]["kernel"][...] == query.T.reshape(6, 2, 3)).all()

    fresh, _, again = nets()
    back = parity.transfer_optimizer(trained, again, fresh, theirs)
    assert back.value is again and sorted(back.arrays) == sorted(told.arrays)
    for p, q in zip(ours.parameters(), fresh.parameters(), strict=True):
        assert optimizer.state[p].keys() == again.state[q].keys()
        for entry, value in optimizer.state[p].items():
            assert torch.equal(value, again.state[q][entry]) and value.dtype == again.state[q][entry].dtype, entry


def test_groups_and_frozen_parameters_go_on():
    with jax.enable_x64(True):
        grads = {name: g for name, g in gradients(100).items() if name in "abc"}
        model, flax = Torch(start()), Flax(start())
        model.d.requires_grad_(False)
        optimizer = grouped(model)
        tx = parity.to_optax(optimizer, model, flax)
        params = last(torch_run(optimizer, model, half(grads, 0)))
        state = parity.transfer_optimizer(optimizer, tx.init(params), model, flax).value
        expected = torch_run(optimizer, model, half(grads, 1))
        actual, state = flax_run(tx, params, half(grads, 1), state)
        assert parted(actual, expected) < 1e-13

        other = Torch(start())
        other.d.requires_grad_(False)
        again = grouped(other)
        parity.transfer_optimizer(state, again, other, flax)
        assert parted(numbers(again), numbers(optimizer)) < 1e-13


def numbers(optimizer: Any) -> dict:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {f"{i}.{k}": v.numpy() for i, p in enumerate(params) for k, v in optimizer.state[p].items()}


def test_inside_a_chain_and_behind_clipping():
    model, flax, grads = Torch(start("float32")), Flax(start("float32")), gradients(4, "float32")
    optimizer = MAKE["Adam"](model.parameters())
    torch_run(optimizer, model, grads)
    tx = optax.chain(optax.identity(), parity.to_optax(optimizer, model, flax, clip=parity.clip_grad_norm(1.0)))
    told = parity.transfer_optimizer(optimizer, tx.init(start("float32")), model, flax)
    found = load("optax").read_state(told.value)
    assert found.counts == {0: 4} and set(found.tensors) == set("abcde")
    assert (found.tensors["c"]["exp_avg"] == optimizer.state[model.c]["exp_avg"].numpy()).all()
    assert str(told) == "10 arrays (exp_avg, exp_avg_sq), updates so far by group: 4"
    data = told.to_dict()
    assert (data["kind"], data["arrays"], data["steps"]) == ("optimizer transfer", [list(pair) for pair in told.arrays], [4])


def test_source_and_target_are_proof_against_later_writes():
    model, flax, grads = Torch(start("float32")), Flax(start("float32")), gradients(4, "float32")
    optimizer = MAKE["Adam"](model.parameters())
    torch_run(optimizer, model, grads)
    tx = parity.to_optax(optimizer)
    state = parity.transfer_optimizer(optimizer, tx.init(start("float32")), model, flax).value
    before = numbers(optimizer)["0.exp_avg"].copy()
    optimizer.state[model.a]["exp_avg"].zero_()
    assert (load("optax").read_state(state).tensors["a"]["exp_avg"] == before).all()
    parity.transfer_optimizer(state, optimizer, model, flax)
    optimizer.state[model.a]["exp_avg"].zero_()
    assert (load("optax").read_state(state).tensors["a"]["exp_avg"] == before).all()


def test_a_state_before_the_first_step_takes_torchs_away():
    model, flax = Torch(start("float32")), Flax(start("float32"))
    optimizer = MAKE["Adam"](model.parameters())
    torch_run(optimizer, model, gradients(2, "float32"))
    parity.transfer_optimizer(parity.to_optax(optimizer).init(start("float32")), optimizer, model, flax)
    assert not optimizer.state


# ---------------------------------------------------------------- refusals


def refused(message: str, source: Any, target: Any, *models: Any, **options: Any) -> None:
    with pytest.raises(parity.InputError, match=f"(?s){message}"):
        parity.transfer_optimizer(source, target, *models, **options)


def test_what_does_not_fit_is_refused_and_nothing_is_written():
    model, flax, grads = Torch(start("float32")), Flax(start("float32")), gradients(3, "float32")
    models = model, flax
    optimizer = MAKE["Adam"](model.parameters())
    blank = parity.to_optax(optimizer).init(start("float32"))
    refused("the optimizer has taken no step; what `init` gives is its state", optimizer, blank, *models)
    refused("one of source and target must be a torch optimizer", optimizer, optimizer, *models)
    refused("one of source and target must be a torch optimizer", blank, blank, *models)
    refused("no state of a twin in a dict with 'a'", optimizer, start("float32"), *models)
    foreign = nnx.Optimizer(flax, optax.adam(0.05), wrt=nnx.Param)
    refused("no state of a twin in flax.nnx.training.optimizer.Optimizer", optimizer, foreign, *models)
    refused("no state of a twin in flax.nnx.training.optimizer.Optimizer", foreign, optimizer, *models)
    torch_run(optimizer, model, grads)
    amsgrad = parity.to_optax(MAKE["Adam amsgrad"](Torch(start("float32")).parameters())).init(start("float32"))
    refused("torch has exp_avg, exp_avg_sq for a, the twin exp_avg, exp_avg_sq, max_exp_avg_sq", optimizer, amsgrad, *models)
    with jax.enable_x64(True):
        wide = parity.to_optax(optimizer).init(start("float64"))
        refused("10 problems.*exp_avg of a is float32 in torch and float64 in the twin", optimizer, wide, *models)
    mean = optimizer.state[model.b].pop("exp_avg")
    refused("torch has exp_avg_sq for b, the twin exp_avg, exp_avg_sq; make the twin anew", optimizer, blank, *models)
    optimizer.state[model.b]["exp_avg"] = mean
    kept = optimizer.state.pop(model.b)
    refused("torch has no state for b: it never had a gradient; pass unused=", optimizer, blank, *models)
    optimizer.state[model.b] = kept
    optimizer.state[model.b]["step"] += 4
    refused("in group 0 a has taken 3 steps and b 7; optax counts once for a group", optimizer, blank, *models)
    optimizer.state[model.b]["step"] -= 4
    scheduler = lrs.StepLR(MAKE["Adam"](model.parameters()), 3)
    refused(
        "group 0 has taken 3 steps and the scheduler 0, of 1 updates each; pass every=",
        optimizer,
        blank,
        *models,
        scheduler=scheduler,
    )
    model.c.requires_grad_(False)
    fewer = parity.to_optax(optimizer, *models).init(start("float32"))
    refused("the twin leaves c alone, but torch has exp_avg, exp_avg_sq for it", optimizer, fewer, *models)
    assert load("optax").read_state(blank).counts == {0: 0}


def test_where_nothing_counts_the_caller_must():
    model, flax = Torch(start("float32")), Flax(start("float32"))
    optimizer = MAKE["SGD dampening"](model.parameters())
    torch_run(optimizer, model, gradients(3, "float32"))
    tx = parity.to_optax(optimizer)
    blank = tx.init(start("float32"))
    refused("nothing tells how many updates group 0 has had; pass step=", optimizer, blank, model, flax)
    assert parity.transfer_optimizer(optimizer, blank, model, flax, step=3).steps == (3,)
    optimizer = MAKE["RMSprop"](model.parameters())
    blank = parity.to_optax(optimizer).init(start("float32"))
    refused("nothing tells how many updates group 0 has had; pass step=", blank, optimizer, model, flax)
    parity.transfer_optimizer(blank, optimizer, model, flax, step=7)
    assert optimizer.state[model.a]["step"] == 7


def test_a_scheduler_that_is_too_far_is_refused():
    model, flax = Torch(start("float32")), Flax(start("float32"))
    optimizer = MAKE["Adam"](model.parameters())
    scheduler = lrs.StepLR(optimizer, 3)
    tx = parity.to_optax(optimizer, scheduler=scheduler)
    _, state = flax_run(tx, start("float32"), gradients(4, "float32"))
    torch_run(optimizer, model, gradients(6, "float32"), scheduler.step)
    before = numbers(optimizer)["0.exp_avg"].copy()
    refused(
        "the scheduler has taken 6 steps and the run 4; give one that is made anew",
        state,
        optimizer,
        model,
        flax,
        scheduler=scheduler,
    )
    assert (numbers(optimizer)["0.exp_avg"] == before).all()


def test_a_scheduler_of_epochs_follows():
    model, flax = Torch(start("float32")), Flax(start("float32"))
    optimizer = MAKE["Adam"](model.parameters())
    scheduler = lrs.ExponentialLR(optimizer, 0.5)
    tx = parity.to_optax(optimizer, scheduler=scheduler, every=3)
    _, state = flax_run(tx, start("float32"), gradients(7, "float32"))
    parity.transfer_optimizer(state, optimizer, model, flax, scheduler=scheduler, every=3)
    assert scheduler.last_epoch == 2 and optimizer.param_groups[0]["lr"] == 0.05 / 4
    blank = tx.init(start("float32"))
    told = parity.transfer_optimizer(optimizer, blank, model, flax, scheduler=scheduler, every=3)
    assert told.steps == (7,)
