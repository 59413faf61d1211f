"""A copy of a torch model that trains, in float64 or as it is, while its owner's stays as it is."""

import contextlib
import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parity.dropout.contexts import replay_dropout
from parity.errors import InputError
from parity.evidence.numerics import UNIT, jittered
from parity.evidence.trees import mapped
from parity.frameworks.torch.dropout import recording
from parity.frameworks.torch.leaves import dtype_name, from_numpy, to_numpy, torch_dtype
from parity.frameworks.torch.losses import LOSSES
from parity.frameworks.torch.modes import Kinks, Shaken, Widened
from parity.frameworks.torch.optimizers import names_of, owns
from parity.frameworks.torch.running import deployed_epsilon, device_of, model_dtype
from parity.frameworks.torch.schedulers import owns as schedules
from parity.training.optimizers import KNOWN, SCALARS
from parity.training.recipe import Recipe


def made(optimizer: Any, model: nn.Module) -> Any:
    """An optimizer of a model: itself, or made of a class, a class with its options, or a function of the parameters.

    Raises:
        InputError: it is none of these, moves what is not the model's, or takes its steps by a closure.
    """
    make, options = optimizer if isinstance(optimizer, tuple) and len(optimizer) == 2 else (optimizer, {})
    made_here = not owns(optimizer) and callable(make) and isinstance(options, Mapping)
    found = make(model.parameters(), **options) if made_here else optimizer
    if not owns(found):
        raise InputError(
            "optimizer must be a torch.optim.Optimizer of the torch model, a class of them, a pair of a class and a dict of "
            f"its options, or a function of the model's parameters that makes one; got {optimizer!r}"
        )
    names_of(found, model)
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"{type(found).__name__} calls the loss by a closure, several times in a step, which cannot be followed step by "
            f"step; {SUPPORTED}"
        )
    return found


SUPPORTED = f"these have a twin in optax: {', '.join(KNOWN)}"


def scheduler_of(scheduler: Any, optimizer: Any) -> Any:
    """A scheduler of an optimizer: itself, or made by a class with its options, or a function; None stays.

    Raises:
        InputError: it is none of these, or belongs to another optimizer.
    """
    make, options = scheduler if isinstance(scheduler, tuple) and len(scheduler) == 2 else (scheduler, {})
    made_here = callable(make) and isinstance(options, Mapping) and not schedules(make)
    found = make(optimizer, **options) if made_here else scheduler
    if found is not None and not schedules(found):
        raise InputError(
            "recipe.scheduler must be a scheduler of torch.optim.lr_scheduler, a pair of a class of them and a dict of its "
            f"options, or a function of the optimizer that makes one; got {scheduler!r}"
        )
    if found is not None and getattr(found, "optimizer", None) is not optimizer:
        raise InputError("the scheduler belongs to another optimizer; give the one that was made for this one")
    return found


def whole_loss(value: Any) -> Tensor:
    """What a loss gave, if a gradient can be taken of it.

    Raises:
        InputError: none can.
    """
    if not isinstance(value, Tensor):
        raise InputError(f"torch's loss must return a tensor without axes, got {type(value).__name__}; return the loss alone")
    if value.ndim or not value.is_floating_point():
        raise InputError(
            f"torch's loss must return one real number, got shape {tuple(value.shape)} of {dtype_name(value)}; take its mean"
        )
    if not value.requires_grad:
        raise InputError(
            "torch's loss does not depend on any parameter that needs a gradient: nothing would be trained; "
            "do not detach it, and call the model that the loss is given"
        )
    return value


def scaling_of(scaler: Any) -> dict[str, Any]:
    """The options and the place of a GradScaler."""
    known = scaler if not isinstance(scaler, Mapping) else torch.amp.GradScaler("cpu", **scaler)
    if not known.is_enabled():
        raise InputError("the scaler is not enabled, so that it does nothing; leave it out")
    state = known.state_dict()
    return {"init_scale": state.pop("scale"), "growth_tracker": state.pop("_growth_tracker")} | state


def droppers(model: nn.Module, paths: Sequence[str]) -> tuple[str, ...]:
    """Of some paths those of dropout modules, which eval mode silences."""
    found = dict(model.named_modules())
    return tuple(path for path in paths if isinstance(found.get(path), nn.modules.dropout._DropoutNd))


def dense(gradient: Tensor) -> np.ndarray:
    """A gradient as an array of its own; `nn.Embedding(sparse=True)` has one of the rows that were looked up."""
    return np.array(to_numpy(gradient.to_dense() if gradient.is_sparse else gradient))


NUMBERS = {name for names in SCALARS.values() for name in names}


class Run:
    """A training run on copies.

    Args:
        model: left as it is.
        optimizer: its optimizer, with the state that it has.
        scheduler: of the optimizer, or None.
        loss: takes a model and a batch of tensors, gives a tensor without axes; or the name of one.
        recipe: what else happens in a step.
        dtype: float64, or None for the model's own.
        silent: paths of dropout modules that drop nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        scheduler: Any,
        loss: Any,
        recipe: Recipe,
        dtype: str | None,
        silent: tuple[str, ...] = (),
    ):
        self.silent = silent
        self.deployed, self.dtype, self.recipe = model_dtype(model), dtype, recipe
        # In one call, so that the copies belong to each other.
        self.model, self.optimizer, self.scheduler = copy.deepcopy((model, optimizer, scheduler))
        if dtype == "float64":
            self.widen()
        if recipe.train is not None:
            self.model.train(recipe.train)
        for path in silent:
            self.model.get_submodule(path).eval()
        self.loss = LOSSES[loss] if isinstance(loss, str) else loss
        self.names = {id(p): name for name, p in self.model.named_parameters()}
        self.moving = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.scaler: Any = None
        if recipe.scaler is not None:
            options = scaling_of(recipe.scaler)
            tracker = options.pop("growth_tracker")
            self.scaler = torch.amp.GradScaler(device_of(self.model).type, **options)
            self.scaler.load_state_dict(self.scaler.state_dict() | {"_growth_tracker": tracker})
            # It makes its tensors when it is first used.
            self.scaler.scale(torch.ones([], device=device_of(self.model)))
        self.skipped = False
        self.last_gradients: dict[str, np.ndarray | None] = {}

    def widen(self) -> None:
        """Continue in float64."""
        self.model.double()
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                # Single numbers stay as torch keeps them.
                if isinstance(value, Tensor) and value.shape == parameter.shape and name not in (*NUMBERS, "step"):
                    state[name] = value.double()

    def forked(self, dtype: str | None = None, rng: np.random.Generator | None = None) -> "Run":
        """Another run from the same place, in a dtype, or on parameters that are moved by at most half an ulp."""
        recipe = self.recipe
        other = Run(self.model, self.optimizer, self.scheduler, self.loss, recipe, dtype, self.silent)
        other.deployed = self.deployed
        if self.scaler is not None:
            # Its scale lives on the device from its first use on; a state dict holds plain numbers.
            other.scaler.load_state_dict(self.scaler.state_dict())
        if rng is not None:
            with torch.no_grad():
                for parameter in other.model.parameters():
                    parameter.copy_(from_numpy(jittered(np.array(to_numpy(parameter)), rng)))
        return other

    @property
    def scale(self) -> float:
        """By which the loss is multiplied."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def tensors(self, batch: Sequence[Any]) -> Any:
        wanted = torch_dtype(self.dtype or self.deployed or "float32")

        def tensor(path: str, value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return value
            found = from_numpy(np.array(value))
            return found.to(device_of(self.model), wanted if found.is_floating_point() else found.dtype)

        return mapped(tensor, tuple(batch))

    def gradients(
        self, batches: Sequence[Sequence[Any]], given: Sequence[Any] | None = None, shake: int | None = None
    ) -> tuple[float, dict[str, np.ndarray | None], list[Any]]:
        """The mean loss of some batches, the gradient of each parameter, None where there is none, and the masks drawn.

        Args:
            batches: as many as are accumulated.
            given: masks of another run to drop by.
            shake: a seed, by which every intermediate result is moved by at most half an ulp.
        """
        for parameter in self.model.parameters():
            parameter.grad = None
        values, drawn = [], list[Any]()
        for number, batch in enumerate(batches):
            tensors = self.tensors(batch)
            wide = Widened(self.deployed) if self.dtype == "float64" else contextlib.nullcontext()
            shaken = contextlib.nullcontext() if shake is None else Shaken(UNIT, shake)
            with torch.enable_grad(), wide, shaken, deployed_epsilon(self.model, self.dtype):
                with self.dropping(given[number] if given else None) as masks:
                    value = whole_loss(self.loss(self.model, *tensors))
                drawn.append(masks)
                part = value / len(batches) if len(batches) > 1 else value
                (part if self.scaler is None else self.scaler.scale(part)).backward()
            values.append(float(value.detach()))
        self.unscale()
        found = {name: None if p.grad is None else dense(p.grad) for name, p in self.model.named_parameters()}
        self.last_gradients = found
        return sum(values) / len(values), found, drawn

    def dropping(self, given: Any) -> Any:
        """Drop by given masks, or put on the record what is dropped."""
        if not self.recipe.dropout:
            return contextlib.nullcontext()
        return recording(self.model) if given is None else replay_dropout(self.model, given)

    def kinks(self, batches: Sequence[Sequence[Any]], given: Sequence[Any] | None, unit: float) -> int:
        """How many values lie so near a kink that rounding in the model's own dtype may change a gradient."""
        watch = Kinks(unit)
        run = self.forked(self.dtype)
        with watch:
            run.gradients(batches, given)
        return watch.near

    def take(self, gradients: Mapping[str, np.ndarray | None]) -> None:
        """Let the next step be taken on these gradients of the loss, multiplied by its scale."""
        for name, parameter in self.model.named_parameters():
            g = gradients.get(name)
            parameter.grad = None if g is None else from_numpy(np.array(g)).to(parameter.device, parameter.dtype) * self.scale
        self.unscale()

    def generators(self) -> Any:
        """The states of torch's generators, for `draw_from`."""
        return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def draw_from(self, states: Any) -> None:
        """Let torch draw from here on what it drew from there on."""
        torch.set_rng_state(states[0])
        if states[1]:
            torch.cuda.set_rng_state_all(states[1])

    def unscale(self) -> None:
        if self.scaler is None:
            return
        self.scaler.unscale_(self.optimizer)
        moving = {id(p) for p in self.moving}
        for parameter in self.model.parameters():
            if id(parameter) not in moving and parameter.grad is not None:
                parameter.grad.div_(self.scale)
        told = self.scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
        self.skipped = any(float(found) for found in told.values())

    def unused(self, batches: Sequence[Sequence[Any]]) -> tuple[str, ...]:
        """The parameters of the optimizer that get no gradient; nothing moves, running statistics neither."""
        here = self.generators()
        _, found, _ = self.forked(self.dtype).gradients(batches)
        self.draw_from(here)
        moved = {self.names[id(p)] for p in self.moving}
        return tuple(name for name, gradient in found.items() if gradient is None and name in moved)

    def update(self, scheduled: bool) -> None:
        """One step of the optimizer on the last gradients, and one of the scheduler if it is time for it."""
        if self.recipe.max_norm is not None:
            nn.utils.clip_grad_norm_(self.moving, self.recipe.max_norm)
        if self.recipe.max_value is not None:
            nn.utils.clip_grad_value_(self.moving, self.recipe.max_value)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None and scheduled:
            with warnings.catch_warnings():
                # The copy's step is not wrapped, from which a scheduler concludes that none was taken.
                warnings.simplefilter("ignore", UserWarning)
                self.scheduler.step()

    def values(self) -> Mapping[str, np.ndarray]:
        """Parameters and buffers by name."""
        return {name: np.array(to_numpy(t)) for name, t in self.model.state_dict().items() if isinstance(t, Tensor)}

    def momenta(self) -> dict[str, float]:
        """The share of a batch's own in each running statistic, by its name."""
        return {
            f"{path}.{name}".lstrip("."): float(module.momentum)
            for path, module in self.model.named_modules()
            for name, _ in module.named_buffers(recurse=False)
            if name.startswith("running_") and isinstance(getattr(module, "momentum", None), float)
        }
