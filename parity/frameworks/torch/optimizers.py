"""Optimizers of torch: their options, and their state read and written."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parity.errors import InputError, listed
from parity.frameworks.torch.leaves import dtype_name, from_numpy, to_numpy
from parity.training.optimizers import KNOWN, REFUSED, SCALARS, TENSORS, Group, Optimizer
from parity.training.schedules import Moved

# What must be off, why, and what to do.
OFF = {
    "differentiable": "gradients do not flow through the update of a twin; make the optimizer without it",
    "capturable": "it takes bias corrections in float32 whatever the parameters' dtype; make the optimizer without it",
}


def owns(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler was made for an optimizer: it wraps its step."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def read(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str] | None = None, moved: Sequence[Moved] | None = None
) -> Optimizer:
    """The optimizer in the words of no framework.

    Args:
        optimizer: an instance of one of torch's own classes.
        names: of its parameters by `id`, as `names_of` gives them; None leaves the groups nameless.
        moved: for each group, the options that a scheduler moves.

    Raises:
        InputError: the class or an option has no twin; all problems at once.
    """
    kind = type(optimizer).__name__
    problems = [] if kind in KNOWN and vars(torch.optim)[kind] is type(optimizer) else [stranger(optimizer)]
    for number, group in enumerate(optimizer.param_groups):
        problems += [f"{name}=True in group {number}: {why}" for name, why in OFF.items() if group.get(name)]
        odd = [tuple(p.shape) for p in group["params"] if not p.is_floating_point()]
        problems += [f"group {number} has parameters of shape {odd[0]} that are no real floats; leave them out"] if odd else []
        if kind == "ASGD" and (
            group.get("foreach") or (group.get("foreach") is None and any(p.is_cuda for p in group["params"]))
        ):
            problems.append(
                f"group {number} of ASGD takes its rate in float32 by foreach; make the optimizer with foreach=False"
            )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        problems.append("the optimizer has step hooks, which a twin cannot call; remove them")
    if problems:
        raise InputError(listed("no optax twin of this optimizer", problems))
    groups = [
        Group(tuple(names[id(p)] for p in group["params"]) if names else (), options(optimizer, group) | dict(change))
        for group, change in zip(optimizer.param_groups, moved or [{}] * len(optimizer.param_groups), strict=True)
    ]
    return Optimizer(kind, tuple(groups), scalar_dtype(optimizer))


def stranger(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer of this class has no twin."""
    cls = type(optimizer)
    if cls.__module__.startswith("torch.optim") and cls.__name__ in REFUSED:
        return f"torch.optim.{cls.__name__}: {REFUSED[cls.__name__]}"
    return f"{cls.__module__}.{cls.__qualname__} is none of torch.optim's {', '.join(KNOWN)}; use one of these itself"


def options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options as plain numbers."""
    found = {name: plain(value) for name, value in group.items() if name not in ("params", "betas", "etas", "step_sizes")}
    if "betas" in group:
        found["beta1"], found["beta2"] = map(plain, group["betas"])
    if "etas" in group:
        found["etaminus"], found["etaplus"] = group["etas"]
        found["step_size_min"], found["step_size_max"] = group["step_sizes"]
    if "initial_accumulator_value" in group:
        # torch fills the sums in the constructor, with its argument, whatever a group says.
        found["initial_accumulator_value"] = optimizer.defaults["initial_accumulator_value"]
    return found


def plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def scalar_dtype(optimizer: torch.optim.Optimizer) -> str:
    """The dtype of single numbers in the state: what they have, or would be given now."""
    for state in optimizer.state.values():
        for name in ("mu_product", "eta"):
            if isinstance(state.get(name), Tensor):
                return dtype_name(state[name])
    return "float64" if torch.get_default_dtype() == torch.float64 else "float32"


def names_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[int, str]:
    """The model's names of an optimizer's parameters, by `id`.

    Raises:
        InputError: a parameter of the optimizer is none of the model's.
    """
    known = {id(p): name for name, p in model.named_parameters()}
    strange = [
        f"parameter {place} of group {number}, shape {tuple(p.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for place, p in enumerate(group["params"])
        if id(p) not in known
    ]
    if strange:
        raise InputError(
            listed("the optimizer moves what is no parameter of torch_model; give the model that it was made for", strange)
        )
    return known


def all_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter, tied ones too, and the name by which `names_of` knows it."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def still(optimizer: torch.optim.Optimizer) -> list[int]:
    """`id` of the parameters that need no gradient, so that torch passes them over."""
    return [id(p) for group in optimizer.param_groups for p in group["params"] if not p.requires_grad]


def read_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, dict[str, np.ndarray | float]]:
    """The state of each parameter that has one: arrays, single numbers and `step`, by torch's names."""
    tensors, scalars = TENSORS[type(optimizer).__name__], (*SCALARS.get(type(optimizer).__name__, ()), "step")
    found: dict[str, dict[str, np.ndarray | float]] = {}
    for parameter, state in optimizer.state.items():
        entries: dict[str, np.ndarray | float] = {
            name: to_numpy(state[name]) for name in tensors if state.get(name) is not None
        }
        entries |= {name: float(state[name]) for name in scalars if name in state}
        if entries:
            found[names[id(parameter)]] = entries
    return found


def write_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], state: Mapping[str, Mapping[str, np.ndarray | float]]
) -> None:
    """Give parameters the state by their name; one that is not named loses its own."""
    kind = type(optimizer).__name__
    # Made in full before anything is replaced.
    made: dict[Tensor, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entries = state.get(names[id(parameter)])
            if entries:
                made[parameter] = {name: as_state(name, value, parameter, kind, group) for name, value in entries.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in made:
                optimizer.state[parameter] = made[parameter]
            else:
                optimizer.state.pop(parameter, None)


def as_state(name: str, value: Any, parameter: Tensor, kind: str, group: Mapping[str, Any]) -> Tensor:
    """One entry as torch itself would make it: arrays beside the parameter, numbers on the CPU unless it is fused."""
    if name in TENSORS[kind]:
        like = torch.empty_like(parameter, memory_format=torch.preserve_format)
        return like.detach().copy_(from_numpy(value).reshape(parameter.shape))
    double = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    device = parameter.device if group.get("fused") else "cpu"
    return torch.tensor(float(value), dtype=torch.float64 if double else torch.float32, device=device)
