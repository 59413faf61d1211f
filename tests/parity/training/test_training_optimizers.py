"""Every optimizer against its twin: parameters in every step, and the state behind the last."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch import nn, optim
from training_helpers import MAKE, STEPS, Flax, Make, Torch, flax_run, gradients, grouped, nets, parted, start, torch_run

import parity
from parity.frameworks import load
from parity.frameworks.optax.transformations import average_length
from parity.training.optimizers import KNOWN


def test_every_optimizer_has_a_case():
    assert {name.split()[0] for name in MAKE} == set(KNOWN)


def both(make: Make, steps: int = STEPS, dtype: str = "float64", **options: Any) -> tuple[Any, Any, dict, dict]:
    model = Torch(start(dtype))
    optimizer = make(model.parameters())
    tx = parity.to_optax(optimizer, **options)
    grads = gradients(steps, dtype)
    expected = torch_run(optimizer, model, grads)
    actual, state = flax_run(tx, start(dtype), grads)
    return optimizer, state, actual, expected


@pytest.mark.parametrize("name", MAKE)
def test_a_hundred_steps_in_float64(name):
    with jax.enable_x64(True):
        optimizer, state, actual, expected = both(MAKE[name])
        assert parted(actual, expected) < 1e-13
        assert parted(kept_by_flax(state, name), kept_by_torch(optimizer, name)) < 1e-13


def kept_by_torch(optimizer: Any, name: str) -> dict[str, np.ndarray]:
    """Every number of the state, by the parameter's place and torch's name; counts that change nothing are left out."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = {}
    for letter, p in zip("abcde", params, strict=True):
        for entry, value in optimizer.state[p].items():
            if value is not None and not (entry == "step" and name.split(maxsplit=1)[0] in ("RMSprop", "Adadelta")):
                whole = value.numpy() if value.ndim or entry not in ("step", "mu_product", "eta", "mu") else np.float64(value)
                found[f"{letter}.{entry}"] = np.asarray(whole)
    return found


def kept_by_flax(state: Any, name: str) -> dict[str, np.ndarray]:
    """The same, found in the state by hand."""
    rename = {
        optax.TraceState: {"trace": "momentum_buffer"},
        optax.ScaleByRmsState: {"nu": "square_avg"},
        optax.ScaleByRStdDevState: {"nu": "square_avg", "mu": "grad_avg"},
        optax.ScaleByAdaDeltaState: {"e_g": "square_avg", "e_x": "acc_delta"},
    }
    found: dict[str, np.ndarray] = {}

    def walk(node: Any) -> None:
        if type(node) in rename:
            for field, entry in rename[type(node)].items():
                found.update({f"{letter}.{entry}": np.asarray(a) for letter, a in getattr(node, field).items()})
        elif type(node).__name__ == "TorchState":
            for entry, tree in node.tensors.items():
                found.update({f"{letter}.{entry}": np.asarray(a) for letter, a in tree.items()})
            numbers = dict(node.scalars) | ({"step": node.count} if name.split(maxsplit=1)[0] != "SGD" else {})
            found.update({f"{x}.{entry}": np.asarray(np.float64(a)) for x in "abcde" for entry, a in numbers.items()})
        elif isinstance(node, tuple | dict):
            for child in node.values() if isinstance(node, dict) else node:
                walk(child)

    walk(state)
    return found


# Ten steps in float32; each rounds a few times, and a root near 0 (`centered`) magnifies it.
@pytest.mark.parametrize("name", MAKE)
def test_ten_steps_in_float32(name):
    *_, actual, expected = both(MAKE[name], 10, "float32")
    assert parted(actual, expected) < 3e-6


@pytest.mark.parametrize("name", ["AdamW amsgrad", "NAdam", "ASGD"])
def test_ten_steps_in_float32_where_jax_has_wider_numbers(name):
    with jax.enable_x64(True):
        *_, actual, expected = both(MAKE[name], 10, "float32")
        assert parted(actual, expected) < 3e-6


def test_the_first_step_of_adam_in_float32_keeps_the_digits_that_optax_loses():
    *_, actual, expected = both(MAKE["Adam"], 1, "float32")
    optaxs, _ = flax_run(optax.adam(0.05), start("float32"), gradients(1, "float32"))
    before = start("float32")

    def moved(found: dict) -> dict:
        return {name: values[0] - before[name] for name, values in found.items()}

    assert parted(moved(actual), moved(expected)) < 1e-6
    assert parted(moved(optaxs), moved(expected)) > 5e-6


@pytest.mark.parametrize("beta2", [0.6, 0.9, 0.999, 0.9999])
def test_the_length_of_radams_average_keeps_its_digits_in_float32(beta2):
    t = np.arange(1, 5000)
    expected = 2 / (1 - beta2) - 1 - 2 * t * beta2**t / (1 - beta2**t)
    np.testing.assert_allclose(np.asarray(average_length(beta2, jnp.asarray(t))), expected, rtol=1e-6)
    with jax.enable_x64(True):
        # As torch computes it, and that loses digits of its own: 2e4 - 2e4 at beta2 = 0.9999.
        np.testing.assert_allclose(np.asarray(average_length(beta2, jnp.asarray(t))), expected, rtol=1e-7)


def test_half_precision_rounds_once_and_stays_half():
    model = Torch(start("float32")).to(torch.bfloat16)
    optimizer = MAKE["AdamW"](model.parameters())
    tx = parity.to_optax(optimizer)
    params = {name: jnp.asarray(array, jnp.bfloat16) for name, array in start("float32").items()}
    state = tx.init(params)
    for step in range(3):
        grads = {name: g[step] for name, g in gradients(3, "float32").items()}
        for name, p in model.named_parameters():
            p.grad = torch.tensor(grads[name]).to(torch.bfloat16)
        optimizer.step()
        updates, state = tx.update({name: jnp.asarray(g, jnp.bfloat16) for name, g in grads.items()}, state, params)
        params = optax.apply_updates(params, updates)
    for name, p in model.named_parameters():
        assert params[name].dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(params[name]), p.detach().float().numpy(), rtol=2e-2, atol=2e-2)


def test_options_given_as_tensors():
    with jax.enable_x64(True):
        lr = torch.tensor(0.05, dtype=torch.float64)
        *_, actual, expected = both(lambda p: optim.SGD(p, lr=lr, momentum=0.9), 5)
        assert parted(actual, expected) < 1e-14


def test_single_numbers_are_kept_as_wide_as_torch_keeps_them():
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with jax.enable_x64(True):
            *_, actual, expected = both(MAKE["NAdam"])
            assert parted(actual, expected) < 1e-14
    finally:
        torch.set_default_dtype(default)


# ---------------------------------------------------------------- groups


@pytest.mark.parametrize("clip", [None, 0.5])
def test_groups_frozen_and_foreign_parameters(clip):
    with jax.enable_x64(True):
        model, grads = Torch(start()), gradients(20)
        model.d.requires_grad_(False)
        optimizer = grouped(model)
        tx = parity.to_optax(optimizer, model, Flax(start()), clip=clip and parity.clip_grad_norm(clip))
        moved = {name: g for name, g in grads.items() if name in "abc"}

        def step() -> None:
            pass

        if clip:
            plain = optimizer.step

            def clipped() -> None:
                nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], clip)
                plain()

            optimizer.step = clipped  # type: ignore[method-assign]
        expected = torch_run(optimizer, model, moved, step)
        # JAX has gradients for everything.
        actual, _ = flax_run(tx, start(), grads)
        assert parted(actual, expected) < 1e-13
        assert all((actual[name] == start()[name]).all() for name in "de")


def test_a_parameter_without_gradient_is_left_alone_where_it_is_named():
    with jax.enable_x64(True):
        model, grads = Torch(start()), gradients(5)
        optimizer = optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        used = {name: g for name, g in grads.items() if name != "c"}
        expected = torch_run(optimizer, model, used)
        alone = parity.to_optax(optimizer, model, Flax(start()), unused="c")
        assert parted(flax_run(alone, start(), used)[0], expected) < 1e-13
        moved = parity.to_optax(optimizer, model, Flax(start()))
        assert parted(flax_run(moved, start(), used)[0], expected) > 0.1


def test_groups_follow_the_pairing_of_layouts_in_nnx_optimizer():
    """Every leaf of Flax, blocks of torch's in_proj_weight among them, decays as its parameter does."""
    ours, theirs, optimizer = nets()
    trained = nnx.Optimizer(theirs, parity.to_optax(optimizer, ours, theirs), wrt=nnx.Param)
    # A gradient of 0 shows the decay alone.
    for p in ours.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(3):
        optimizer.step()
        trained.update(theirs, jax.tree.map(jnp.zeros_like, nnx.state(theirs, nnx.Param)))
    back = parity.transfer(theirs, ours.state_dict()).value
    for name, p in ours.state_dict().items():
        np.testing.assert_allclose(back[name].numpy(), p.numpy(), rtol=1e-6, err_msg=name)


def test_a_parameter_with_two_names_is_one():
    with jax.enable_x64(True):
        model, flax, grads = Torch(start()), Flax(start()), gradients(5)
        model.again, flax.again = model.c, flax.c
        optimizer = grouped(model)
        params = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(flax, nnx.Param))}
        shared = {name: grads["c" if name == "again" else name] for name in params}
        tx = parity.to_optax(optimizer, model, flax)
        actual, state = flax_run(tx, params, shared)
        expected = torch_run(optimizer, model, {name: g for name, g in grads.items() if name != "e"})
        actual["c"] = actual.pop("again", actual.get("c"))
        assert parted(actual, expected) < 1e-13
        assert len(parity.transfer_optimizer(state, optimizer, model, flax).arrays) == 9


def test_a_twin_works_inside_a_chain():
    with jax.enable_x64(True):
        model, grads = Torch(start()), gradients(6)
        optimizer = MAKE["Adam"](model.parameters())
        tx = optax.chain(optax.scale(2.0), parity.to_optax(optimizer))
        expected = torch_run(optimizer, model, {name: 2 * g for name, g in grads.items()})
        assert parted(flax_run(tx, start(), grads)[0], expected) < 1e-13


# ---------------------------------------------------------------- refusals


class Mine(optim.Adam):
    pass


def hooked(p: Any) -> optim.Optimizer:
    optimizer = optim.SGD(p, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def two_groups(p: Any) -> optim.Optimizer:
    first, *rest = p
    return optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)


REFUSED = {
    "LBFGS": (optim.LBFGS, "calls the loss several times.*optax.lbfgs"),
    "SparseAdam": (lambda p: optim.SparseAdam(list(p)), "rows that have a gradient.*use Adam"),
    "Adafactor": (optim.Adafactor, "factors moments.*use AdamW"),
    "Muon": (lambda p: optim.Muon([q for q in p if q.ndim == 2]), "orthogonalises.*use AdamW"),
    "subclass": (Mine, "Mine is none of torch.optim's Adam, AdamW"),
    "differentiable": (
        lambda p: optim.Adam(p, differentiable=True),
        "differentiable=True in group 0.*make the optimizer without",
    ),
    "capturable": (
        lambda p: optim.Adam(p, capturable=True),
        "capturable=True in group 0: it takes bias corrections in float32",
    ),
    "foreach": (lambda p: optim.ASGD(p, foreach=True), "foreach=False"),
    "both": (lambda p: optim.NAdam(p, capturable=True, differentiable=True), "2 problems"),
    "complex": (
        lambda p: optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1),
        r"group 0 has parameters of shape \(2,\) that are no real floats",
    ),
    "hooks": (hooked, "step hooks.*remove them"),
    "groups": (two_groups, "it has 2 parameter groups: pass torch_model and flax_model too"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_twin_is_refused_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises(parity.InputError, match=f"(?s){message}"):
        parity.to_optax(make(Torch(start("float32")).parameters()))


def test_frozen_parameters_without_models_are_refused():
    model = Torch(start("float32"))
    model.a.requires_grad_(False)
    with pytest.raises(parity.InputError, match="1 of its parameters need no gradient: pass torch_model and flax_model too"):
        parity.to_optax(MAKE["SGD"](model.parameters()))


def test_calls_that_do_not_fit_are_refused():
    model, flax = Torch(start("float32")), Flax(start("float32"))
    optimizer = MAKE["SGD"](model.parameters())
    scheduler = optim.lr_scheduler.StepLR(MAKE["SGD"](model.parameters()), 3)
    other = Torch(start("float32"))
    refused: list[tuple[dict[str, Any], str]] = [
        (dict(scheduler=scheduler), "belongs to another optimizer"),
        (dict(torch_model=model), "give both or neither"),
        (dict(every=0), "every=0"),
        (dict(steps=0), "steps=0"),
        (dict(clip=1.0), r"clip must be a transformation of optax, got 1.0; pass parity.clip_grad_norm\(1.0\)"),
        (dict(unused="c"), "unused names parameters: pass torch_model"),
        (dict(torch_model=model, flax_model=flax, unused="x*"), r"unused: 'x\*' fits no parameter"),
        (dict(torch_model=other, flax_model=flax), "5 problems.*parameter 0 of group 0, shape \\(5, 3\\)"),
    ]
    for options, message in refused:
        with pytest.raises(parity.InputError, match=f"(?s){message}"):
            parity.to_optax(optimizer, **options)
    with pytest.raises(parity.InputError, match=r"to_optax takes an optimizer .* got flax.nnx.rnglib.Rngs"):
        parity.to_optax(nnx.Rngs(0))


def test_models_that_do_not_fit_and_parameters_that_flax_lacks_are_refused():
    model = Torch(start("float32"))
    optimizer = MAKE["SGD"](model.parameters())
    fewer = Flax({name: array for name, array in start("float32").items() if name != "c"})
    with pytest.raises(
        parity.TransferError, match=r"(?s)the models do not fit.*c .3, 2, 4. of the torch model has no counterpart"
    ):
        parity.to_optax(optimizer, model, fewer)
    with pytest.raises(
        parity.TransferError, match=re.escape("c has no counterpart in the Flax model, but the optimizer moves it")
    ):
        parity.to_optax(optimizer, model, fewer, ignore="c")
    model.c.requires_grad_(False)
    parity.to_optax(optimizer, model, fewer, ignore="c")


def test_a_tree_with_strange_leaves_is_refused():
    model = Torch(start("float32"))
    tx = parity.to_optax(MAKE["SGD"](model.parameters()), model, Flax(start("float32")))
    with pytest.raises(parity.InputError, match=r"f: no such parameter in flax_model.*nnx.state"):
        tx.init(start("float32") | {"f": np.ones(2, np.float32)})


@pytest.mark.parametrize("whole", [True, False])
def test_linens_variables_are_known_whole_or_by_their_params_alone(whole):
    model = Torch(start("float32"))
    described = load("torch.optimizers").read(MAKE["SGD"](model.parameters()), {id(p): n for n, p in model.named_parameters()})
    tx = load("optax").twin(described, {f"params.{name}": 0 if name == "b" else None for name in start()})
    params: Any = {"params": start("float32")} if whole else start("float32")
    updates, _ = tx.update(params, tx.init(params), params)
    moved = {name for name, update in (updates["params"] if whole else updates).items() if np.any(update)}
    assert moved == {"b"}


def test_nothing_of_the_optimizer_is_changed():
    model = Torch(start("float32"))
    optimizer = MAKE["NAdam decay"](model.parameters())
    before = repr(optimizer.state_dict())
    parity.to_optax(optimizer)
    assert repr(optimizer.state_dict()) == before
