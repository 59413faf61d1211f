"""Random configurations of the leaf layers of torch.nn and of their Linen counterparts, written out by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen as nn
from rule_cases import EPSILONS, IMAGE, PICK, SPACE, TorchAttention, TorchLayer, TorchState, picker, random, randomised

import parity

Built = tuple[torch.nn.Module, nn.Module, Any]


class LinenLayer(nn.Module):
    """The layer between two moves of the channels: last in Flax, in torch where `channels` says."""

    layer: nn.Module
    channels: int | None = 1

    def setup(self) -> None:
        self.mark = self.param("mark", nn.initializers.zeros, (2,))

    def __call__(self, *x: Any) -> Any:
        if self.channels is None:
            return self.layer(*x)
        return jnp.moveaxis(self.layer(*(jnp.moveaxis(one, self.channels, -1) for one in x)), -1, self.channels)


class LinenFlat(LinenLayer):
    """The layer between two reshapes: torch keeps in one axis what Flax keeps in several."""

    def __call__(self, x: Any) -> Any:
        several = len(getattr(self.layer, "shape", ())) > 3 or sorted(np.ravel(getattr(self.layer, "axis", -1))) == [-2, -1]
        several = several or getattr(self.layer, "shape", ())[:2] == (2, 3)
        y = self.layer(x.reshape(*x.shape[:-1], *((2, 3) if several else (6,))))
        return y.reshape(*x.shape[:-1], -1)


class LinenBothWays(LinenLayer):
    """Outputs, then the states in the order in which torch stacks them."""

    def __call__(self, x: Any) -> Any:
        states, y = self.layer(x, return_carry=True)
        if not isinstance(states[0], tuple):
            return [y, jnp.stack(states)]
        # torch has h and c, Flax c and h.
        return [y, jnp.stack([h for _, h in states]), jnp.stack([c for c, _ in states])]


class LinenState(LinenLayer):
    """Everything that a cell or a layer returns, in one list: outputs, then the state."""

    def __call__(self, x: Any, *state: Any) -> Any:
        layer = isinstance(self.layer, nn.RNN)
        state = tuple(one[0] for one in state) if layer else state
        # torch has h and c, Flax c and h.
        carry = state[::-1] if len(state) > 1 else state[0]
        new, y = self.layer(x, initial_carry=carry, return_carry=True) if layer else self.layer(carry, x)
        return ([y] if layer else []) + (list(new[::-1]) if isinstance(new, tuple) else [new])


@dataclass(frozen=True)
class Case:
    """A pair of layers: `build` draws a configuration and gives both layers and the shapes of the inputs."""

    rule: str
    build: Callable[[PICK], Built]
    configurations: int = 1
    channels: int | None = 1
    wrap: tuple[Any, Any] = (TorchLayer, LinenLayer)

    @property
    def id(self) -> str:
        return self.rule.removeprefix("torch.nn.")


def pair_of(case: Case, number: int) -> tuple[torch.nn.Module, parity.Linen, tuple[torch.Tensor, ...]]:
    """The pair in a configuration of its own, torch's side random, Flax's without values, and inputs."""
    torch_layer, linen_layer, shape = case.build(picker("linen", case.rule, number))
    source = randomised(case.wrap[0](torch_layer), case.rule, number)
    rng = random("rule input", case.rule, number)
    shapes: Any = shape if isinstance(shape[0], tuple) else (shape,)
    x = tuple(torch.from_numpy(rng.standard_normal(one).astype(np.float32)) for one in shapes)
    return source, parity.Linen(case.wrap[1](linen_layer, case.channels), None, *x), x


# ---------------------------------------------------------------- layers


def dense(pick: PICK) -> Built:
    inputs, outputs, bias = pick(4, 6), pick(4, 5), pick(True, False)
    return torch.nn.Linear(inputs, outputs, bias), nn.Dense(outputs, use_bias=bias), (3, 5, inputs)


def conv(ndim: int) -> Callable[[PICK], Built]:
    def build(pick: PICK) -> Built:
        groups, bias, stride, dilation = pick(1, 2), pick(True, False), pick(1, 2), pick(1, 2)
        kernel, mode = tuple(pick(1, 2, 3) for _ in range(ndim)), pick("zeros", "zeros", "circular", "reflect")
        padding: Any = tuple(pick(0, 1, 2) for _ in range(ndim))
        flax_padding: Any = tuple((p, p) for p in padding)
        if mode != "zeros":
            kernel, padding, flax_padding = (3,) * ndim, dilation, mode.upper()
        torch_layer = getattr(torch.nn, f"Conv{ndim}d")(
            4, 6, kernel, stride, padding, dilation, groups, bias, padding_mode=mode
        )
        options = dict(padding=flax_padding, kernel_dilation=dilation, feature_group_count=groups, use_bias=bias)
        return torch_layer, nn.Conv(6, kernel, (stride,) * ndim, **options), (2, 4, *SPACE[ndim])

    return build


def conv_transpose(ndim: int) -> Callable[[PICK], Built]:
    def build(pick: PICK) -> Built:
        kernel, stride, dilation = tuple(pick(1, 2, 3) for _ in range(ndim)), pick(2, 3), pick(1, 2)
        padding, extra = tuple(pick(0, 1) for _ in range(ndim)), pick(0, 1)
        outputs, bias = pick(4, 5), pick(True, False)
        torch_layer = getattr(torch.nn, f"ConvTranspose{ndim}d")(4, outputs, kernel, stride, padding, extra, 1, bias, dilation)
        numbers = tuple((dilation * (k - 1) - p, dilation * (k - 1) - p + extra) for k, p in zip(kernel, padding))
        options = dict(padding=numbers, kernel_dilation=(dilation,) * ndim, use_bias=bias, transpose_kernel=pick(True, False))
        linen_layer = nn.ConvTranspose(outputs, kernel, (stride,) * ndim, **options)
        return torch_layer, linen_layer, (2, 4, *(size - 1 for size in SPACE[ndim]))

    return build


def norm(cls: Any, affine: bool, eps: float, **options: Any) -> nn.Module:
    return cls(epsilon=eps, use_bias=affine, use_scale=affine, use_fast_variance=False, **options)


def layer_norm(pick: PICK) -> Built:
    eps, affine = pick(*EPSILONS), pick(True, False)
    return torch.nn.LayerNorm(6, eps, affine), norm(nn.LayerNorm, affine, eps), (3, 5, 6)


def batch_norm(ndim: int, name: str = "") -> Callable[[PICK], Built]:
    def build(pick: PICK) -> Built:
        eps, momentum, affine = pick(*EPSILONS), pick(0.1, 0.01, 0.3), pick(True, False)
        torch_layer = getattr(torch.nn, name or f"BatchNorm{ndim}d")(6, eps, momentum, affine)
        linen_layer = norm(nn.BatchNorm, affine, eps, momentum=1 - momentum, use_running_average=True)
        return torch_layer, linen_layer, (3, 6, *IMAGE[ndim])

    return build


def instance_norm(ndim: int) -> Callable[[PICK], Built]:
    def build(pick: PICK) -> Built:
        eps, affine = pick(*EPSILONS), pick(True, False)
        torch_layer = getattr(torch.nn, f"InstanceNorm{ndim}d")(6, eps, affine=affine)
        return torch_layer, norm(nn.InstanceNorm, affine, eps), (3, 6, *IMAGE[ndim])

    return build


def group_norm(pick: PICK) -> Built:
    eps, groups, affine = pick(*EPSILONS), pick(1, 2, 3, 6), pick(True, False)
    by_size = affine and pick(True, False)
    options = dict(num_groups=None, group_size=6 // groups) if by_size else dict(num_groups=groups)
    return (
        torch.nn.GroupNorm(groups, 6, eps, affine),
        norm(nn.GroupNorm, affine, eps, **options),
        (3, 6, *pick(*IMAGE.values())),
    )


def rms_norm(pick: PICK) -> Built:
    eps, affine = pick(None, *EPSILONS), pick(True, True, False)
    return torch.nn.RMSNorm(6, eps, affine), nn.RMSNorm(epsilon=eps or 2.0**-23, use_scale=affine), (3, 5, 6)


def prelu(pick: PICK) -> Built:
    return torch.nn.PReLU(), nn.PReLU(), (3, 4, 5)


def attention(pick: PICK) -> Built:
    heads, kdim, bias = pick(1, 2, 4), pick(None, 6), pick(True, False)
    torch_layer = torch.nn.MultiheadAttention(8, heads, bias=bias, kdim=kdim, vdim=kdim, batch_first=True)
    cls = pick(nn.MultiHeadDotProductAttention, nn.MultiHeadAttention)
    linen_layer = cls(heads, use_bias=bias, qkv_features=8, out_features=8)
    return torch_layer, linen_layer, ((2, 5, 8), (2, 7, kdim or 8), (2, 7, kdim or 8))


CELLS = {"GRU": (nn.GRUCell,), "LSTM": (nn.LSTMCell, nn.OptimizedLSTMCell), "RNN": (nn.SimpleCell,)}


def recurrent(name: str, layer: bool) -> Callable[[PICK], Built]:
    def build(pick: PICK) -> Built:
        activation = pick("tanh", "relu") if name == "RNN" else "tanh"
        options: dict[str, Any] = dict(nonlinearity=activation) if name == "RNN" else {}
        cell = pick(*CELLS[name])(4, activation_fn=jax.nn.relu if activation == "relu" else jnp.tanh)
        torch_layer = getattr(torch.nn, name if layer else f"{name}Cell")(
            3, 4, **options, **(dict(batch_first=True) if layer else {})
        )
        states = ((1, 2, 4) if layer else (2, 4),) * (2 if name == "LSTM" else 1)
        return torch_layer, nn.RNN(cell) if layer else cell, ((2, 5, 3) if layer else (2, 3), *states)

    return build


STATES = (TorchState, LinenState)
CASES = [
    Case("torch.nn.Linear", dense, 2, channels=None),
    Case("torch.nn.LayerNorm", layer_norm, 2, channels=None),
    *(Case(f"torch.nn.Conv{n}d", conv(n), 2 if n == 2 else 1) for n in (1, 2, 3)),
    *(Case(f"torch.nn.ConvTranspose{n}d", conv_transpose(n), 2 if n == 2 else 1) for n in (1, 2, 3)),
    *(Case(f"torch.nn.BatchNorm{n}d", batch_norm(n), 2 if n == 1 else 1) for n in (1, 2, 3)),
    Case("torch.nn.SyncBatchNorm", batch_norm(2, "SyncBatchNorm")),
    *(Case(f"torch.nn.InstanceNorm{n}d", instance_norm(n)) for n in (1, 2, 3)),
    Case("torch.nn.GroupNorm", group_norm, 3),
    Case("torch.nn.RMSNorm", rms_norm, 2, channels=None),
    Case("torch.nn.PReLU", prelu),
    *(Case(f"torch.nn.{n}Cell", recurrent(n, False), 2 if n == "LSTM" else 1, wrap=STATES) for n in CELLS),
    *(Case(f"torch.nn.{n}", recurrent(n, True), wrap=STATES) for n in CELLS),
    Case("torch.nn.MultiheadAttention", attention, 3, channels=None, wrap=(TorchAttention, LinenLayer)),
]
