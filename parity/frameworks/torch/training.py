"""A copy of a torch model that trains in float64 while its owner's stays as it is."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parity.frameworks.torch.leaves import from_numpy, to_numpy
from parity.frameworks.torch.modes import Widened
from parity.frameworks.torch.running import deployed_epsilon, device_of, model_dtype


class Run:
    """A training run on copies.

    Args:
        model: left as it is, in the mode that it is in.
        optimizer: its optimizer, with the state that it has.
        scheduler: of the optimizer, or None.
        loss: takes a model and a batch of tensors, gives a tensor without axes.
        max_norm: of `clip_grad_norm_`; None for none.
    """

    def __init__(self, model: nn.Module, optimizer: Any, scheduler: Any, loss: Callable[..., Tensor], max_norm: float | None):
        self.deployed = model_dtype(model)
        # In one call, so that the copies belong to each other.
        self.model, self.optimizer, self.scheduler = copy.deepcopy((model, optimizer, scheduler))
        self.model.double()
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                    state[name] = value.double()
        self.loss, self.max_norm = loss, max_norm
        self.names = {id(p): name for name, p in self.model.named_parameters()}

    def gradients(self, batch: Sequence[np.ndarray]) -> tuple[float, dict[str, np.ndarray | None]]:
        """The loss, and the gradient of each parameter; None where there is none."""
        self.optimizer.zero_grad(set_to_none=True)
        tensors = [widened(from_numpy(np.array(array))).to(device_of(self.model)) for array in batch]
        with torch.enable_grad(), Widened(self.deployed), deployed_epsilon(self.model, "float64"):
            value = self.loss(self.model, *tensors)
            value.backward()
        found = {name: None if p.grad is None else np.array(to_numpy(p.grad)) for name, p in self.model.named_parameters()}
        return float(value.detach()), found

    def unused(self, batch: Sequence[np.ndarray]) -> tuple[str, ...]:
        """The parameters of the optimizer that get no gradient; nothing moves, running statistics neither."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        _, found = self.gradients(batch)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(before[name])
        moved = {self.names[id(p)] for group in self.optimizer.param_groups for p in group["params"]}
        return tuple(name for name, gradient in found.items() if gradient is None and name in moved)

    def update(self, scheduled: bool) -> None:
        """One step of the optimizer on the last gradients, and one of the scheduler if it is time for it."""
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        if self.scheduler is not None and scheduled:
            with warnings.catch_warnings():
                # The copy's step is not wrapped, from which a scheduler concludes that none was taken.
                warnings.simplefilter("ignore", UserWarning)
                self.scheduler.step()

    def values(self) -> Mapping[str, np.ndarray]:
        """Parameters and buffers by name."""
        return {name: np.array(to_numpy(t)) for name, t in self.model.state_dict().items() if isinstance(t, Tensor)}


def widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
