"""Dispatch modes that watch or change what a torch model computes."""

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parity.frameworks.torch.leaves import dtype_name, torch_dtype


class Mode(TorchDispatchMode):
    """A dispatch mode that torch.compile leaves alone, without reading torch's compiler for it where nobody compiles.

    Torch wraps every mode so that it is not compiled itself, and reads its whole compiler at the first operation under it:
    two seconds of each process (torch 2.13).
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # What torch asks whether it shall wrap; an older one does not ask, and wraps by no other way.
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__torch_dispatch__" in vars(cls):
            setattr(cls, "__torch_dispatch__", never_compiled(vars(cls)["__torch_dispatch__"]))  # noqa: B010


def never_compiled(method: Any) -> Any:
    """The method, hidden from torch's compiler as soon as that is there."""
    hidden = functools.cache(lambda: torch.compiler.disable(method))

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (hidden() if "torch._dynamo" in sys.modules else method)(*args, **kwargs)

    return called


class Widened(Mode):
    """Leave out casts that would cut a float64 run to the dtype in which the model is deployed, or a wider one.

    Where the model is deployed such a cast does nothing. A cast to a narrower dtype rounds there
    too, and stays. What a model makes of whole numbers, as an embedding of time steps does, is in the
    deployed dtype in a float64 run too: it is widened where it meets float64, which torch refuses unasked.
    """

    def __init__(self, deployed: str | None):
        super().__init__()
        self.kept_from = kept_from(deployed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cast = func.overloadpacket is torch.ops.aten._to_copy and args[0].dtype == torch.float64
        if cast and kwargs.get("dtype") in self.kept_from:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func is torch.ops.aten.hardsigmoid_backward.default and args[0].dtype == torch.float64:
            # Torch's kernel multiplies by one sixth in float32, whatever it is given.
            return torch.where(args[1].abs() < 3, args[0] / 6, 0.0)
        return func(*self.met(func, args), **kwargs)

    def met(self, func: Any, args: Any) -> Any:
        """The arguments of an operation, all in float64 if one is. What it writes into stays the caller's."""
        found = {a.dtype for a in args if isinstance(a, Tensor)}
        if torch.float64 not in found or not found & self.kept_from:
            return args
        writes = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
        return tuple(
            a.double() if isinstance(a, Tensor) and a.dtype in self.kept_from and not write else a
            for a, write in zip(args, writes, strict=False)
        )


class Together(TorchFunctionMode):
    """What `Widened` does, for functions that refuse two dtypes before it sees an operation.

    A convolution of pixels that are made floats of in the forward pass is one.
    """

    ASKING = frozenset(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))
    ASKING |= {"scaled_dot_product_attention"}

    def __init__(self, deployed: str | None):
        super().__init__()
        self.kept_from = kept_from(deployed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if getattr(func, "__name__", "") in self.ASKING and any(a.dtype == torch.float64 for a in given):
            args, kwargs = tuple(map(self.wide, args)), {name: self.wide(a) for name, a in kwargs.items()}
        return func(*args, **kwargs)

    def wide(self, value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.dtype in self.kept_from else value


def kept_from(deployed: str | None) -> set[torch.dtype]:
    """The dtypes to which a float64 run must not be cut, of a model that is deployed in one."""
    return {torch_dtype(deployed or "float32"), torch.float32} - {torch.float64}


class Kinks(Mode):
    """Count values that lie so close to a kink or to another that ties for a maximum that rounding decides.

    There two correct implementations may differ by a whole gradient.

    Attributes:
        near: how many values lie within `units` * u * scale of a kink or a tie, but not on it.
        exact: how many lie on a kink. That is no question of rounding: dead units feed no gradient.
        ties: how many tie for a maximum. Nor is that, but frameworks choose other gradients there.
        bounds: by operation and bound, whether a value lies on the far side of it.
    """

    # Operation and the place of its kink; clamp and hardtanh have theirs in the arguments.
    PLACES = ("relu", "leaky_relu", "abs", "threshold", "hardtanh", "clamp", "clamp_min", "clamp_max", "elu", "sign")
    # Operations that choose among the values along an axis, or in a window.
    CHOICES: tuple[str, ...] = ("max", "min", "amax", "amin", "topk", "sort", "median", "kthvalue", "cummax", "cummin")
    CHOICES += ("argmax", "argmin")
    PAIRS = ("maximum", "minimum", "max", "min")
    # A score of -1e9 or beyond is hidden: it says nothing of the rounding of the others.
    HIDDEN = 1e9

    def __init__(self, unit: float, units: float = 64.0):
        super().__init__()
        self.unit, self.units, self.near, self.exact, self.ties = unit, units, 0, 0, 0
        self.bounds: dict[tuple[str, float], bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].numel():
            x, others = args[0].detach(), [a for a in args[1:] if isinstance(a, Tensor)]
            if name.rstrip("_") in self.PLACES:
                bounds = [a for a in args[1:] if isinstance(a, int | float)] if "clamp" in name or name == "hardtanh" else [0.0]
                self.exact += self.count(x[x.isfinite()], [(x - b).abs() for b in bounds])
                for bound in bounds if name == "hardtanh" else ():
                    beyond = bool((x > bound).any() and (x < bound).any())
                    self.bounds[name, bound] = self.bounds.get((name, bound), False) or beyond
            elif name in self.PAIRS and others:
                self.ties += self.count(self.shown(x), [(x - others[0].detach()).abs()])
            elif name in self.CHOICES:
                self.ties += self.count(self.shown(x), [gaps(x, func, args, kwargs or {})])
            elif name.startswith("max_pool"):
                self.ties += self.count(self.shown(x), [window_gaps(x, func, args, kwargs or {})])
        return func(*args, **(kwargs or {}))

    def shown(self, x: Tensor) -> Tensor:
        return x[x.isfinite() & (x.abs() < self.HIDDEN)]

    def count(self, values: Tensor, distances: list[Tensor]) -> int:
        """How many distances are none; those that rounding could close are added to `near`."""
        margin = self.units * self.unit * float(values.abs().max()) if values.numel() else 0.0
        self.near += sum(int(((d <= margin) & (d > 0)).sum()) for d in distances)
        return sum(int((d == 0).sum()) for d in distances)


def gaps(x: Tensor, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Between neighbours in order along the axis of a choice; of all values where it has none."""
    name = func.overloadpacket.__name__
    # Behind the number of those that are chosen, if there is one.
    first = 2 if name in ("topk", "kthvalue") else 1
    axis = kwargs.get("dim", next((a for a in args[first:] if isinstance(a, int) and not isinstance(a, bool)), None))
    if axis is None and name in ("topk", "kthvalue", "sort"):
        axis = -1
    if axis is None and len(args) > 1 and isinstance(args[1], list | tuple) and len(args[1]) == 1:
        axis = args[1][0]
    ordered = (x.flatten() if axis is None or x.ndim == 0 else x.movedim(axis, -1)).sort(-1).values
    steps = ordered[..., 1:] - ordered[..., :-1]
    # Of a maximum only the first two count, of a sorted axis all.
    if name in ("max", "amax", "argmax"):
        steps = steps[..., -1:]
    elif name in ("min", "amin", "argmin"):
        steps = steps[..., :1]
    return steps[~steps.isnan()]


def window_gaps(x: Tensor, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Between the largest and the second value of every window of a maximum pooling."""
    if "with_indices" not in func.overloadpacket.__name__:
        return x.new_ones(0)
    best, places = func(x, *args[1:], **kwargs)
    spatial = 2 if "2d" in func.overloadpacket.__name__ else 3
    rest = x.flatten(-spatial).scatter(-1, places.flatten(-spatial), float("-inf")).reshape(x.shape)
    second = func(rest, *args[1:], **kwargs)[0]
    distance = best - second
    return distance[distance.isfinite()]


class Shaken(Mode):
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
