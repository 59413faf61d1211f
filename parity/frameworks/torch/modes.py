"""Dispatch modes that watch or change what a torch model computes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parity.frameworks.torch.leaves import dtype_name, torch_dtype


class Widened(TorchDispatchMode):
    """Leave out casts that would cut a float64 run to the dtype in which the model is deployed, or a wider one.

    Where the model is deployed such a cast does nothing. A cast to a narrower dtype rounds there
    too, and stays.
    """

    def __init__(self, deployed: str | None):
        super().__init__()
        self.kept_from = {torch_dtype(deployed or "float32"), torch.float32} - {torch.float64}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cast = func.overloadpacket is torch.ops.aten._to_copy and args[0].dtype == torch.float64
        if cast and kwargs.get("dtype") in self.kept_from:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


class Kinks(TorchDispatchMode):
    """Count values that lie so close to a kink that rounding decides on which side.

    There two correct implementations may differ by a whole gradient.

    Attributes:
        near: how many values lie within `units` * u * scale of a kink.
    """

    # Operation and the place of its kink; clamp and hardtanh have theirs in the arguments.
    PLACES = ("relu", "leaky_relu", "abs", "threshold", "hardtanh", "clamp", "clamp_min", "clamp_max", "elu", "sign")

    def __init__(self, unit: float, units: float = 64.0):
        super().__init__()
        self.unit, self.units, self.near = unit, units, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.rstrip("_") in self.PLACES and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].numel():
            x = args[0].detach()
            bounds = [a for a in args[1:] if isinstance(a, int | float)] if "clamp" in name or name == "hardtanh" else [0.0]
            finite = x[x.isfinite()].abs()
            margin = self.units * self.unit * float(finite.max()) if finite.numel() else 0.0
            # An exact zero on both sides is no question of rounding: dead units feed no gradient.
            self.near += sum(int((((x - b).abs() <= margin) & (x != b)).sum()) for b in bounds)
        return func(*args, **(kwargs or {}))


class Shaken(TorchDispatchMode):
    """Move every computed value, forward and backward, by at most half an ulp of its dtype.

    Two correct implementations differ in how intermediate results are rounded; this shows how
    much such roundings matter at the end, also where a plain run cancels them exactly.

    Source:
        Parker 1997, "Monte Carlo arithmetic".
    """

    # Their results are copies of what they were given: nobody rounds there.
    COPIES: tuple[str, ...] = (
        "clone",
        "copy",
        "_to_copy",
        "where",
        "masked_fill",
        "relu",
        "cat",
        "stack",
        "index",
        "index_select",
        "gather",
    )
    COPIES += (
        "embedding",
        "constant_pad_nd",
        "flip",
        "threshold_backward",
        "zeros",
        "zeros_like",
        "zero",
        "fill",
        "full",
        "full_like",
        "ones",
    )
    COPIES += ("ones_like", "new_zeros", "empty", "empty_like", "scalar_tensor", "lift_fresh", "repeat", "arange", "neg", "abs")

    def __init__(self, units: Mapping[str, float], seed: int):
        super().__init__()
        self.units = units
        self.seed, self.drawn = seed, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        views = any(not alias.is_write for alias in aliases)
        if views or func.overloadpacket.__name__.rstrip("_") in self.COPIES:
            return result
        if aliases:
            # Who calls an operation in place goes on with what he gave it, whatever it returns.
            for written in result if isinstance(result, tuple) else (result,):
                written.copy_(self.moved(written))
            return result
        if isinstance(result, tuple):
            return tuple(self.moved(r) for r in result)
        return self.moved(result)

    def moved(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or dtype_name(value) not in self.units:
            return value
        wide = value.double() * (1 + self.units[dtype_name(value)] * self.uniform(value.shape, value.device))
        return wide.to(value.dtype)

    def uniform(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Numbers between -1 and 1, others each time."""
        self.drawn += 1
        generator = torch.Generator(device=device).manual_seed(self.seed * 1_000_003 + self.drawn)
        return torch.rand(shape, generator=generator, dtype=torch.float64, device=device) * 2 - 1
