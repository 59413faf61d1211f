"""Rounding as a port has it that is written in elementary operations."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.frameworks.torch.modes import Shaken

aten = torch.ops.aten

# Kernels that round once at their end, where the same formula written out rounds at each step.
FUSED = (
    *(aten._softmax, aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data, aten.logsumexp),
    *(aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward),
    *(aten.native_batch_norm, aten._native_batch_norm_legit, aten.native_batch_norm_backward),
    *(aten.var, aten.var_mean, aten.std, aten.std_mean, aten.mean, aten.linalg_vector_norm),
    *(aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward, aten.sigmoid_backward, aten.tanh_backward),
    *(aten.elu, aten.elu_backward, aten.mish, aten.mish_backward, aten.softplus, aten.softplus_backward),
    *(aten.addmm, aten.lerp, aten.addcmul, aten.addcdiv, aten.rsqrt),
    *(aten._scaled_dot_product_flash_attention_for_cpu,),
)

# Largest relative error of XLA's float32 functions on the CPU in units of roundoff, rounded up: 100,000 arguments of
# magnitude 1e-3 to 10 against float64 (jax 0.10; torch 2.13 stays below 1.5 but for sigmoid). What is not named has 1.
FLOAT32_ERRORS = {"tanh": 5.0, "erf": 5.0, "expm1": 6.0, "log1p": 3.5, "sigmoid": 2.5, "log": 2.0, "exp": 1.5, "rsqrt": 1.5}


PRODUCTS = (aten.mm.default, aten.bmm.default)
TOTALS = (aten.sum.default, aten.sum.dim_IntList)
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


@functools.cache
def written_out() -> Mapping[Any, Any]:
    """The fused kernels as functions of elementary operations."""
    # Torch reads a good part of its compiler with this: only who looks for noise pays for it.
    from torch._decomp import get_decompositions

    return get_decompositions(FUSED)


class Elementary(Shaken):
    """Move the result of every elementary operation of a float64 run by at most the roundoff of another dtype.

    Torch's own kernels hide how often a formula rounds: softmax, norms and their gradients compute
    with more digits inside. A faithful port of them in elementary operations rounds at every step,
    and where values cancel between two steps each of these roundings can be seen at the end. In a
    float64 run nothing else is rounded, so that what these runs show is that noise alone.

    Source:
        Parker 1997, "Monte Carlo arithmetic", at the virtual precision of the deployed dtype.
    """

    def __init__(self, units: Mapping[str, float], dtype: str, seed: int):
        super().__init__({"float64": units[dtype]}, seed)
        self.unit, self.errors = units[dtype], FLOAT32_ERRORS if dtype == "float32" else {}
        # Products of a half precision are added up in float32; the gradient of a bias that is added behind them is not.
        self.half = dtype in ("bfloat16", "float16")
        self.running_sums = TOTALS if self.half else TOTALS + PRODUCTS
        self.convolutions = CONVOLUTIONS[1:] if self.half else CONVOLUTIONS
        self.table = written_out()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.table:
            with self:
                return self.table[func](*args, **(kwargs or {}))
        self.units = {"float64": self.unit * self.errors.get(func.overloadpacket.__name__.strip("_"), 1.0)}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in self.convolutions:
            return self.convolved(func, args, result)
        return result.add_(self.running(func, args, kwargs or {})) if func in self.running_sums else result

    def running(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """What rounding every partial sum adds to a sum or a product of matrices.

        Partial sum k moves by its part d_k, so that the term j, which is in all that follow, is weighted by the sum of
        d_k from j on: the operation itself, with weighted terms.
        """
        terms = args[0]
        if func in PRODUCTS:
            axes = [terms.ndim - 1]
        else:
            given = args[1] if len(args) > 1 and args[1] else range(terms.ndim)
            axes = [axis % terms.ndim for axis in given]
        return func(self.weighted(terms, axes), *args[1:], **kwargs)

    def weighted(self, terms: Tensor, axes: Sequence[int]) -> Tensor:
        """Terms of a sum over some axes, each times the sum of the moves of all partial sums that it is in."""
        sizes = [n if axis in axes else 1 for axis, n in enumerate(terms.shape)]
        parts = self.uniform(torch.Size([math.prod(sizes)]), terms.device) * self.unit
        # Of runs with an odd seed from the last term on, as the gradient of a loop adds up: if that term is the largest,
        # every partial sum is as large.
        later = parts.cumsum(0) if self.seed % 2 else parts.flip(0).cumsum(0).flip(0)
        return terms * later.reshape(sizes)

    def convolved(self, func: Any, args: Any, result: Any) -> Any:
        """A convolution, or its gradients, with what rounding every partial sum adds.

        Outputs and the input's gradient add up over channels and the kernel, the kernel's gradient over the batch and all
        positions: by far the longest of these sums. In half precision products are added up in float32, and the gradient of
        the bias alone is rounded at each term, as where a port adds the bias behind.
        """
        if func is CONVOLUTIONS[0]:
            given, weight, _, *settings = args
            kernel = [axis for axis in range(weight.ndim) if axis != (1 if settings[3] else 0)]
            return result.add_(func(given, self.weighted(weight, kernel), None, *settings))
        above, given, weight, bias, *settings, wanted = args
        transposed, positions = settings[3], [0, *range(2, given.ndim)]
        to_bias = func(self.weighted(above, positions), given, weight, bias, *settings, [False, False, wanted[2]])
        if self.half:
            return (*result[:2], result[2] if to_bias[2] is None else result[2].add_(to_bias[2]))
        kernel = [axis for axis in range(weight.ndim) if axis != (0 if transposed else 1)]
        to_input = func(above, given, self.weighted(weight, kernel), bias, *settings, [wanted[0], False, False])
        # The kernel of a transposed convolution meets each number that is given, that of another each that comes out.
        parts = (above, self.weighted(given, positions)) if transposed else (self.weighted(above, positions), given)
        to_weight = func(*parts, weight, bias, *settings, [False, wanted[1], False])
        moves = (to_input[0], to_weight[1], to_bias[2])
        return tuple(one if move is None else one.add_(move) for one, move in zip(result, moves, strict=True))
