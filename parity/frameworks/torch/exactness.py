"""Proof, operation by operation, that a torch model's float32 arithmetic is exact on given numbers.

If every sum is exact, its order does not matter, and any other implementation of the same
function must return the same bits. The model runs in float64 under a dispatcher that checks
each operation; what cannot be proved becomes NaN, which taints all that depends on it, or
ends the proof with the name of the operation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parity.evidence.numerics import significant_bits
from parity.frameworks.torch.modes import Mode

aten = torch.ops.aten

# exp(x) is zero in float32, denormals included, from here on down.
SATURATED = -104.0
# Sums of up to this many quanta are exact in float32.
EXACT = 2.0**24


class NotProvableError(Exception):
    """An operation whose result depends on how it is rounded.

    Attributes:
        structural: whether it is so whatever the numbers.
    """

    def __init__(self, operation: str, reason: str, structural: bool = True):
        super().__init__(f"{operation}: {reason}")
        self.structural = structural


@dataclass(frozen=True)
class Origin:
    """Where a tensor comes from.

    Attributes:
        nearest: names of the parameters and inputs that the last product took in directly.
        rounded: whether elements may be off by a rounding, the same for equal elements.
        all: names of everything that it depends on.
        tainted: whether an element may be NaN because it is not proved.
    """

    nearest: frozenset[str] = frozenset()
    all: frozenset[str] = frozenset()
    rounded: bool = False
    tainted: bool = False


class Prover(Mode):
    """Watch a float64 run.

    Attributes:
        unsaturated: origins of softmax inputs whose rows were neither one-hot nor tied in two,
            four or eight: what to scale for another try.
        scores: names of everything on which a softmax input depends.
    """

    def __init__(self, names: dict[int, str]):
        super().__init__()
        self.names = names
        self.origins: dict[int, Origin] = {}
        self.keep: list[Tensor] = []
        self.unsaturated: set[str] = set()
        self.scores: set[str] = set()

    def origin(self, tensor: Tensor) -> Origin:
        if id(tensor) in self.names:
            name = self.names[id(tensor)]
            return Origin(frozenset({name}), frozenset({name}))
        return self.origins.get(id(tensor), Origin())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [a for a in flat(args) + flat(list(kwargs.values())) if isinstance(a, Tensor)]
        name = func.overloadpacket
        # Sums of whole numbers are exact whatever their size.
        if name in SUMS and any(t.is_floating_point() for t in operands):
            result = self.summed(func, args, kwargs, operands)
        elif name is aten._softmax:
            result = self.softmax(func, args, kwargs)
        elif name is aten._local_scalar_dense and not operands[0].is_floating_point():
            # A whole number that the module looks at, as a check of ids does; unproved ones do not come so far.
            result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
            self.elementwise(func, args, operands, result)
        return result

    def note(self, result: Tensor, origin: Origin) -> None:
        self.origins[id(result)] = origin
        self.keep.append(result)

    def summed(self, func: Any, args: Any, kwargs: Any, operands: list[Tensor]) -> Tensor:
        """A sum of products: exact if the sum of magnitudes, in quanta of the products, stays below 2^24."""
        label = func.overloadpacket.__name__
        for tensor in operands:
            if self.origin(tensor).rounded:
                raise NotProvableError(label, "it sums numbers that are already rounded")
        if any(kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
            raise NotProvableError(label, "it scales what it sums")
        result = func(*args, **kwargs)
        magnitudes = func(*[a.abs() if isinstance(a, Tensor) else a for a in args], **kwargs)
        if func.overloadpacket is aten.mean and result.numel():
            magnitudes = magnitudes * (operands[0].numel() // result.numel())
        quanta = [significant_bits(to_float64(t))[1] for t in operands]
        if func.overloadpacket in (aten.addmm, aten.baddbmm):
            quantum = min(quanta[0], quanta[1] * quanta[2])
        elif len(quanta) == 3:
            quantum = min(quanta[2], quanta[0] * quanta[1])
        else:
            quantum = math.prod(quanta)
        largest = float(torch.nan_to_num(magnitudes, nan=0.0, posinf=0.0).max()) if magnitudes.numel() else 0.0
        if largest / quantum >= EXACT:
            # A product of two activations feeds scores, or is fed by them: narrower inputs may help.
            self.scores |= frozenset().union(*(self.origin(t).all for t in operands))
            bits = math.ceil(math.log2(largest / quantum)) + 1
            raise NotProvableError(label, f"its sums need {bits} bits, float32 has 24", structural=False)
        if func.overloadpacket is aten.mean and not power_of_two(operands[0].numel() // max(1, result.numel())):
            raise NotProvableError(label, "it divides by a number that is no power of two", structural=False)
        if not representable(magnitudes):
            raise NotProvableError(label, "its sums do not fit float32", structural=False)
        nearest = [t for t in operands if id(t) in self.names or self.aliases_name(t)]
        near: frozenset[str] = frozenset().union(*(self.origin(t).nearest for t in (nearest or operands)))
        tainted = any(self.origin(t).tainted for t in operands)
        self.note(result, Origin(near, frozenset().union(*(self.origin(t).all for t in operands)), tainted=tainted))
        return result

    def aliases_name(self, tensor: Tensor) -> bool:
        origin = self.origin(tensor)
        return len(origin.all) == 1 and next(iter(origin.all)).startswith("parameter ")

    def elementwise(self, func: Any, args: Any, operands: list[Tensor], result: Any) -> None:
        """A result that is a float32 number was not rounded; one that is not may only be a monotone image."""
        label = func.overloadpacket.__name__
        found = [t for t in flat([result]) if isinstance(t, Tensor)]
        origins = [self.origin(t) for t in operands]
        near = frozenset().union(*(o.nearest for o in origins))
        everything = frozenset().union(*(o.all for o in origins))
        rounded = any(o.rounded for o in origins)
        tainted = any(o.tainted for o in origins)
        if func.overloadpacket not in EXACT_OPERATIONS | SUMS:
            raise NotProvableError(label, "its result is rounded, or is not known to be exact")
        for tensor in found:
            if tainted and not tensor.is_floating_point() and not tensor.is_complex():
                # A comparison would hide the NaN that marks what is not proved.
                raise NotProvableError(label, "it decides by numbers that are not proved", structural=False)
            inexact = rounded and tensor.is_floating_point()
            if tensor.is_floating_point() and not representable(tensor):
                scalars_only = sum(t.numel() > 1 for t in operands) <= 1
                constant = func.overloadpacket in CONSTANTS
                if not constant and not (func.overloadpacket in SCALINGS and scalars_only):
                    raise NotProvableError(label, "its result does not fit float32 exactly", structural=False)
                inexact = True
            if func.overloadpacket in DIVISIONS and tensor.is_floating_point() and reciprocal_differs(args, tensor):
                # x / c may be x * (1 / c) elsewhere, which rounds twice. Moved off float32's numbers,
                # so that no sum takes it for exact; equal quotients stay equal, and in order.
                tensor.mul_(1 + 2.0**-40)
                inexact = True
            self.note(tensor, Origin(near, everything, inexact, tainted))
        if rounded and func.overloadpacket not in KEEPS_ROUNDED | SCALINGS:
            raise NotProvableError(label, "it combines numbers that are already rounded")

    def softmax(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """One-hot rows, rows tied in 2^k and rows of minus infinities are exact; the others become NaN."""
        scores, dim = args[0], args[1]
        origin = self.origin(scores)
        self.scores |= origin.all
        top = scores.amax(dim, keepdim=True) if scores.numel() else scores
        below = scores - top
        winners = below == 0
        count = winners.sum(dim, keepdim=True)
        # A rounded score is off by a few parts in 2^24 of itself.
        slack = 2.0**-20 * top.abs().nan_to_num(0.0, posinf=0.0, neginf=0.0)
        far = (below < SATURATED - slack) | winners
        power = (count & (count - 1)) == 0
        hidden = (scores == -math.inf).all(dim, keepdim=True) if scores.numel() else count.bool()
        proved = (far.all(dim, keepdim=True) & power & (count > 0)) | hidden
        unsaturated = ~far.all(dim, keepdim=True) & ~hidden & ~scores.isnan().any(dim, keepdim=True)
        if bool(unsaturated.any()):
            self.unsaturated |= origin.nearest
        result = func(*args, **kwargs)
        # Saturated, but for the last digits that exp leaves in float64.
        exact = torch.where(winners, 1.0 / count.clamp(min=1).to(result.dtype), torch.zeros_like(result))
        result = torch.where(proved & ~hidden, exact, torch.full_like(result, math.nan))
        self.note(result, Origin(frozenset(), origin.all, tainted=origin.tainted or not bool(proved.all())))
        return result


def to_float64(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy()


def representable(tensor: Tensor) -> bool:
    finite = tensor[tensor.isfinite()]
    return bool((finite.float().double() == finite).all())


def power_of_two(number: float) -> bool:
    return math.frexp(number)[0] in (0.5, -0.5)


def reciprocal_differs(args: Any, quotient: Tensor) -> bool:
    """Whether a quotient of one divisor for many numbers may also be taken as a product with its reciprocal."""
    divisor = args[1]
    if not isinstance(divisor, Tensor):
        return not power_of_two(float(divisor))
    if divisor.numel() == quotient.numel() > 1:
        return False
    return not all(power_of_two(float(d)) for d in divisor.detach().double().unique())


def flat(values: Any) -> list[Any]:
    found = []
    for value in values:
        found += flat(value) if isinstance(value, list | tuple) else [value]
    return found


SUMS = {
    *(aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.dot, aten.sum, aten.mean, aten.cumsum, aten.convolution),
}
# By one number: equal elements stay equal, and their order stays.
SCALINGS = {aten.div, aten.mul, aten.sqrt}
DIVISIONS = {aten.div, aten.div_}
# A constant that float32 cannot hold, such as -1e20, is rounded to the same number by everyone.
CONSTANTS = {aten.masked_fill, aten.masked_fill_, aten.full, aten.scalar_tensor, aten.lift_fresh}
# Results that are copies of operands, or rounded once by every implementation.
KEEPS_ROUNDED = {
    *(aten.view, aten._unsafe_view, aten.reshape, aten.t, aten.transpose, aten.permute, aten.expand, aten.clone),
    *(aten.detach, aten.alias, aten.unsqueeze, aten.squeeze, aten.slice, aten.select, aten.split, aten.chunk, aten.unbind),
    *(aten.unsafe_split, aten.unsafe_chunk),
    *(aten.contiguous, aten.masked_fill, aten.masked_fill_, aten.where, aten.relu, aten.amax, aten.maximum, aten.minimum),
    *(aten.amin, aten.max, aten.min),
    *(aten.cat, aten.stack, aten.index, aten.index_select, aten.gather, aten.embedding, aten.flip, aten.tril, aten.triu),
    *(aten.split_with_sizes, aten.copy_, aten._to_copy, aten.lift_fresh, aten.isnan, aten.isinf, aten.eq, aten.ne),
}
EXACT_OPERATIONS = {
    *KEEPS_ROUNDED,
    *(aten.add, aten.sub, aten.mul, aten.div, aten.neg, aten.abs, aten.sqrt, aten.rsub, aten.clamp, aten.clamp_min),
    *(aten.gt, aten.ge, aten.lt, aten.le, aten.logical_not, aten.logical_and, aten.logical_or, aten.bitwise_not),
    *(aten.bitwise_and, aten.bitwise_or, aten.arange, aten.ones, aten.zeros, aten.full, aten.empty, aten.ones_like),
    *(aten.zeros_like, aten.full_like, aten.scalar_tensor, aten.any, aten.all, aten.fill_, aten.add_, aten.mul_, aten.div_),
    *(aten.max_pool2d_with_indices, aten.constant_pad_nd, aten.new_zeros, aten.new_full),
}


def prove(run: Callable[[], Any], names: dict[int, str]) -> tuple[Any, Prover]:
    """Run a function under a prover.

    Args:
        run: the model in float64.
        names: names of its parameters and inputs by `id`.

    Raises:
        NotProvableError: an operation's result depends on how it is rounded.
    """
    prover = Prover(names)
    with prover:
        return run(), prover
