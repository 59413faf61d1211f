"""What comes back through a torch model: gradients of every module's outputs, in which order, and by which use."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parity.evidence.calls import Call
from parity.evidence.trees import flatten
from parity.frameworks.torch.isolation import MODULE_BY_MODULE
from parity.frameworks.torch.leaves import is_array
from parity.frameworks.torch.running import evaluate, plain


@dataclass
class Backward:
    """One backward pass.

    Attributes:
        order: parameters in the order in which their gradients are complete: those nearest the loss first.
        outputs: by module and call, the gradient of each of its outputs, by path in what it returns.
    """

    order: list[str] = field(default_factory=list)
    outputs: dict[tuple[str, int], dict[str, np.ndarray]] = field(default_factory=dict)


def observe_backward(
    model: nn.Module, call: Call, cotangents: Mapping[str, np.ndarray], *, dtype: str | None = None
) -> Backward:
    """Run a model forwards and backwards, and put on the record what comes back to every module.

    Args:
        model: left as it is.
        call: the arguments, in NumPy.
        cotangents: by output path.
        dtype: as of `evaluate`.
    """
    found, counts, known, handles = Backward(), dict[str, int](), set[int](), []

    def arrived(name: str) -> Callable[[Tensor], None]:
        def arrive(_: Tensor) -> None:
            found.order.append(name)

        return arrive

    def kept(key: tuple[str, int], name: str) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            found.outputs.setdefault(key, {})[name] = plain(gradient)

        return keep

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any) -> None:
            # Those of this run: copies stand in the place of the model's own.
            for name, parameter in module.named_parameters(path, recurse=False):
                if parameter.requires_grad and id(parameter) not in known:
                    known.add(id(parameter))
                    parameter.register_hook(arrived(name))

        return hook

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            key = path, counts.get(path, 0)
            counts[path] = key[1] + 1
            for name, leaf in flatten(output, is_array):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(kept(key, name))

        return hook

    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(path)))
            handles.append(module.register_forward_hook(leave(path)))
        with MODULE_BY_MODULE():
            evaluate(model, call, dtype=dtype, cotangents=cotangents)
    finally:
        for handle in handles:
            handle.remove()
    return found


class Uses(TorchFunctionMode):
    """Puts a copy of its own in the place of a parameter wherever a function takes it.

    Args:
        parameter: the tensor; found by identity.
    """

    def __init__(self, parameter: Tensor):
        super().__init__()
        self.parameter, self.copies = parameter, list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        def apart(value: Any) -> Any:
            if value is not self.parameter:
                return value
            with torch._C.DisableTorchFunction():
                self.copies.append(value.detach().clone().requires_grad_())
            return self.copies[-1]

        named = {name: apart(value) for name, value in (kwargs or {}).items()}
        return func(*(apart(value) for value in args), **named)


def gradients_by_use(
    model: nn.Module, call: Call, cotangents: Mapping[str, np.ndarray], path: str, *, dtype: str | None = None
) -> list[np.ndarray]:
    """The gradient of a parameter by each operation that takes it, in the order of the forward pass; their sum is its own."""
    module, _, name = path.rpartition(".")
    found: list[Uses] = []
    inside: list[Any] = []

    def enter(_: nn.Module, __: Any) -> None:
        here = getattr(model.get_submodule(module), name)
        found.append(Uses(here))
        inside.append(found[-1])
        found[-1].__enter__()

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        inside.pop().__exit__(None, None, None)
        heads = [(t, cotangents[p]) for p, t in flatten(output, is_array) if p in cotangents and t.requires_grad]
        copies = found[-1].copies
        if heads and copies:
            grown = [torch.as_tensor(np.array(c)).to(t.device, t.dtype) for t, c in heads]
            made = torch.autograd.grad([t for t, _ in heads], copies, grown, allow_unused=True, retain_graph=True)
            results.extend(plain(g) for g in made if g is not None)

    results: list[np.ndarray] = []
    handles = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave)]
    try:
        evaluate(model, call, dtype=dtype, cotangents=cotangents)
    finally:
        for handle in handles:
            handle.remove()
        for mode in reversed(inside):
            mode.__exit__(None, None, None)
    return results
