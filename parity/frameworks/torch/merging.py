"""The weight that torch itself computes from several arrays, bit for bit."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm, _WeightNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from parity.errors import InputError
from parity.frameworks.torch.leaves import from_numpy, is_model, to_numpy
from parity.weights.computed import Computed
from parity.weights.merging import lora_factors, spectral_axis


def effective(value: Any, one: Computed, number: float | None) -> np.ndarray:
    """A weight of a model or state_dict as its layer computes it in evaluation; nothing in the model moves.

    Args:
        value: the model or state_dict.
        one: which weight.
        number: by what the product of a LoRA adapter is multiplied, where no model says it.

    Raises:
        InputError: the layer does more than this, or a state_dict does not say how.
    """
    layer = value.get_submodule(one.owner) if is_model(value) else None
    arrays = {name: leaf.read() for name, leaf in one.pieces.items()}
    tensors = {name: from_numpy(array) for name, array in arrays.items()}
    with torch.no_grad():
        if one.kind == "weight_norm":
            found = torch._weight_norm(tensors["v"], tensors["g"], norm_dim(layer, one, tensors["g"]))
        elif one.kind == "spectral_norm":
            wide = {name: array.astype(np.float64) for name, array in arrays.items()}
            axis = spectral_axis(one.path, wide) if layer is None else maker(layer, one, (_SpectralNorm, SpectralNorm)).dim
            matrix = tensors["weight"].movedim(axis, 0).flatten(1)
            found = tensors["weight"] / torch.dot(tensors["u"], torch.mv(matrix, tensors["v"]))
        else:
            found = with_adapters(layer, one, tensors, number)
    return to_numpy(found)


def norm_dim(layer: nn.Module | None, one: Computed, g: Tensor) -> int:
    """The axis that keeps its norms, -1 for one norm of all."""
    if layer is not None:
        return int(maker(layer, one, (_WeightNorm, WeightNorm)).dim)
    return next((axis for axis, size in enumerate(g.shape) if size > 1), 0 if g.ndim else -1)


def maker(layer: nn.Module, one: Computed, kinds: tuple[type, type]) -> Any:
    """What computes a weight in a layer: a parametrization, or in the older form a hook.

    Raises:
        InputError: something else has a part in it.
    """
    if parametrize.is_parametrized(layer, one.name):
        parts = list(layer.parametrizations[one.name])  # type: ignore[index, arg-type]
        if len(parts) == 1 and isinstance(parts[0], kinds[0]):
            return parts[0]
        names = ", ".join(type(part).__name__ for part in parts)
        raise InputError(
            f"{one.path} is parametrized by {names}, not by {one.kind} alone; "
            "call torch.nn.utils.parametrize.remove_parametrizations on the layer first"
        )
    hooks = [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, kinds[1]) and hook.name == one.name]  # type: ignore[attr-defined]
    if not hooks:
        raise InputError(f"{' and '.join(one.paths)} have the names of {one.kind}, but no hook of torch.nn.utils.{one.kind}")
    return hooks[0]


def with_adapters(layer: Any, one: Computed, tensors: dict[str, Tensor], number: float | None) -> Tensor:
    """A weight with its LoRA adapters added, in the order of operations of peft.

    Raises:
        InputError: an adapter is of another kind.

    Source:
        `Linear.get_delta_weight` of peft.tuners.lora.
    """
    if layer is None:
        first, second = lora_factors(one, number)
        weight = tensors["weight"]
        return weight + added(tensors[first], tensors[second], number or 0, weight.dtype)
    if getattr(layer, "merged", False) or getattr(layer, "disable_adapters", False):
        # It is in the large matrix already, or takes no part.
        return tensors["weight"]
    if any(getattr(layer, "use_dora", {}).values()) or any(b.bias is not None for b in layer.lora_B.values()):
        raise InputError(f"the adapter of {one.path} is no plain LoRA (DoRA, or a bias); let peft merge it (merge_and_unload)")
    weight = tensors["weight"]
    for name in getattr(layer, "active_adapters", layer.lora_A):
        a, b = tensors[f"A {name}"], tensors[f"B {name}"]
        if a.ndim != 2 or not hasattr(layer, "scaling"):
            raise InputError(f"the adapter {name} of {one.path} is no pair of matrices with a scaling; let peft merge it")
        delta = added(a, b, layer.scaling[name], weight.dtype)
        weight = weight + (delta.T if getattr(layer, "fan_in_fan_out", False) else delta)
    return weight


def added(a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """The product that an adapter adds, rounded once: peft multiplies half precision in float32."""
    if dtype in (torch.float16, torch.bfloat16):
        a, b = a.float(), b.float()
    return ((b @ a) * scaling).to(dtype)
