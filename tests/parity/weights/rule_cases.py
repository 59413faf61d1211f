"""Random configurations of the leaf layers of torch.nn and of their Flax counterparts, written out by hand."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from helpers import random
from torch import nn
from torch.nn.utils import parametrizations

import parity
from parity.weights.computed import WEIGHT_NORM

torch.set_num_threads(1)

PICK = Callable[..., Any]
Built = tuple[nn.Module, nnx.Module, Any]


@dataclass(frozen=True)
class Case:
    """A pair of layers: `build` draws a configuration and gives both layers and the shapes of the inputs."""

    rule: str
    build: Callable[[PICK], Built]
    configurations: int = 3
    channels: int | None = 1
    wrap: tuple[Any, Any] = field(default_factory=lambda: (TorchLayer, FlaxLayer))
    form: str = ""

    @property
    def id(self) -> str:
        return "-".join(filter(None, (self.rule.removeprefix("torch.nn."), self.form)))


class TorchLayer(nn.Module):
    """The layer, and an array that nobody uses, so that a layer without arrays has company."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.mark = layer, nn.Parameter(torch.zeros(2))

    def forward(self, *x: Any) -> Any:
        return self.layer(*x)


class FlaxLayer(nnx.Module):
    """The layer between two moves of the channels: last in Flax, in torch where `channels` says."""

    def __init__(self, layer: nnx.Module, channels: int | None = 1):
        self.layer, self.channels, self.mark = layer, channels, nnx.Param(jnp.zeros(2))

    def __call__(self, *x: Any) -> Any:
        if self.channels is None:
            return self.layer(*x)
        return jnp.moveaxis(self.layer(*(jnp.moveaxis(one, self.channels, -1) for one in x)), -1, self.channels)


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


def picker(*name: Any) -> PICK:
    rng = random("rules", *name)
    return lambda *choices: choices[int(rng.integers(len(choices)))]


def randomised(module: nn.Module, *name: Any) -> nn.Module:
    """Random values in every parameter and buffer; variances stay above 0."""
    rng = random("rule weights", *name)
    with torch.no_grad():
        for path, tensor in module.state_dict(keep_vars=True).items():
            value = torch.from_numpy(np.asarray(rng.standard_normal(tuple(tensor.shape))))
            value = torch.zeros_like(value) if "bias_hh" in path else value
            tensor.copy_(torch.tensor(7) if not tensor.is_floating_point() else value.abs() + 0.5 if "var" in path else value)
    return module.eval()


def evaluated(layer: nnx.Module) -> nnx.Module:
    layer.eval()
    return layer


def pair_of(case: Case, number: int) -> tuple[nn.Module, nnx.Module, tuple[torch.Tensor, ...]]:
    """The pair in a configuration of its own, torch's side random, and inputs."""
    torch_layer, flax_layer, shape = case.build(picker(*filter(None, (case.rule, case.form)), number))
    source = randomised(case.wrap[0](torch_layer), case.rule, number)
    rng = random("rule input", case.rule, number)
    shapes: Any = shape if isinstance(shape[0], tuple) else (shape,)
    x = tuple(torch.from_numpy(rng.standard_normal(one).astype(np.float32)) for one in shapes)
    return source, evaluated(case.wrap[1](flax_layer, case.channels)), x


def levels(report: parity.Report) -> dict[str, str]:
    return {level.level: level.status for level in report.levels}


def agree(source: Any, target: Any, *x: Any, chosen: tuple[str, ...] = ("weights", "identical"), **options: Any) -> None:
    report = parity.compare(source, target, *x, levels=chosen, **options)
    assert all(status == "passed" for status in levels(report).values()), str(report)


def gap(torch_layer: nn.Module, flax_layer: Any, x: torch.Tensor, channels: int | None = 1) -> float:
    """The largest difference of the outputs in float32."""
    expected = torch_layer(x).detach().numpy()
    actual = np.asarray(FlaxLayer(flax_layer, channels)(jnp.asarray(x.numpy())))
    return float(np.abs(expected - actual).max())


# ---------------------------------------------------------------- convolutions

SPACE = {1: (9,), 2: (8, 7), 3: (6, 5, 4)}


def conv(ndim: int) -> Callable[[PICK], Built]:
    def build(pick: PICK) -> Built:
        groups, bias, stride, dilation = pick(1, 2), pick(True, False), pick(1, 2), pick(1, 2)
        kernel, mode = tuple(pick(1, 2, 3) for _ in range(ndim)), pick("zeros", "zeros", "circular", "reflect")
        padding: Any = tuple(pick(0, 1, 2) for _ in range(ndim))
        flax_padding: Any = tuple((p, p) for p in padding)
        if mode != "zeros":
            kernel, padding, flax_padding = (3,) * ndim, dilation, mode.upper()
        torch_layer = getattr(nn, f"Conv{ndim}d")(4, 6, kernel, stride, padding, dilation, groups, bias, padding_mode=mode)
        flax_layer = nnx.Conv(
            *(4, 6, kernel, pick(stride, (stride,) * ndim)),
            padding=flax_padding,
            kernel_dilation=dilation,
            feature_group_count=groups,
            use_bias=bias,
            rngs=rngs(),
        )
        return torch_layer, flax_layer, (2, 4, *SPACE[ndim])

    return build


def conv_transpose(ndim: int) -> Callable[[PICK], Built]:
    def build(pick: PICK) -> Built:
        kernel, stride, dilation = tuple(pick(1, 2, 3) for _ in range(ndim)), pick(2, 3), pick(1, 2)
        padding, extra = tuple(pick(0, 1) for _ in range(ndim)), pick(0, 1)
        outputs, bias = pick(4, 5), pick(True, False)
        torch_layer = getattr(nn, f"ConvTranspose{ndim}d")(4, outputs, kernel, stride, padding, extra, 1, bias, dilation)
        numbers = tuple((dilation * (k - 1) - p, dilation * (k - 1) - p + extra) for k, p in zip(kernel, padding))
        flax_layer = nnx.ConvTranspose(
            *(4, outputs, kernel, stride),
            padding=numbers,
            kernel_dilation=dilation,
            use_bias=bias,
            transpose_kernel=pick(True, False),
            rngs=rngs(),
        )
        return torch_layer, flax_layer, (2, 4, *(size - 1 for size in SPACE[ndim]))

    return build


# ---------------------------------------------------------------- normalisation and activations

EPSILONS = (1e-5, 1e-3, 0.5)
IMAGE = {1: (5,), 2: (4, 3), 3: (3, 2, 2)}


def batch_norm(name: str) -> Callable[[PICK], Built]:
    ndim = int(name[-2]) if name.endswith("d") else 2

    def build(pick: PICK) -> Built:
        eps, momentum, affine = pick(*EPSILONS), pick(0.1, 0.01, 0.3), pick(True, False)
        torch_layer = getattr(nn, name)(6, eps, momentum, affine)
        flax_layer = nnx.BatchNorm(
            *(6,), epsilon=eps, momentum=1 - momentum, use_bias=affine, use_scale=affine, use_fast_variance=False, rngs=rngs()
        )
        return torch_layer, flax_layer, (3, 6, *IMAGE[ndim])

    return build


def instance_norm(ndim: int) -> Callable[[PICK], Built]:
    def build(pick: PICK) -> Built:
        eps, affine = pick(*EPSILONS), pick(True, False)
        torch_layer = getattr(nn, f"InstanceNorm{ndim}d")(6, eps, affine=affine)
        flax_layer = nnx.InstanceNorm(6, epsilon=eps, use_bias=affine, use_scale=affine, use_fast_variance=False, rngs=rngs())
        return torch_layer, flax_layer, (3, 6, *IMAGE[ndim])

    return build


def group_norm(pick: PICK) -> Built:
    eps, groups, affine = pick(*EPSILONS), pick(1, 2, 3, 6), pick(True, False)
    flax_layer = nnx.GroupNorm(
        *(6, groups), epsilon=eps, use_bias=affine, use_scale=affine, use_fast_variance=False, rngs=rngs()
    )
    return nn.GroupNorm(groups, 6, eps, affine), flax_layer, (3, 6, *pick(*IMAGE.values()))


def rms_norm(pick: PICK) -> Built:
    eps, affine = pick(None, *EPSILONS), pick(True, True, False)
    flax_layer = nnx.RMSNorm(6, epsilon=eps or 2.0**-23, use_scale=affine, rngs=rngs())
    return nn.RMSNorm(6, eps, affine), flax_layer, (3, 5, 6)


def prelu(pick: PICK) -> Built:
    count = pick(1, 4)
    return nn.PReLU(count), nnx.PReLU(0.0 if count == 1 else jnp.zeros(count)), (3, 4, 5)


# ---------------------------------------------------------------- linear layers and their weights


class FlaxFlat(FlaxLayer):
    """The layer between two reshapes: torch keeps in one axis what Flax keeps in several."""

    def __call__(self, x: Any) -> Any:
        inputs = (2, 3) if self.layer.kernel.ndim > 2 and self.layer.kernel.shape[:2] == (2, 3) else (6,)
        return self.layer(x.reshape(*x.shape[:-1], *inputs)).reshape(*x.shape[:-1], -1)


def linear_general(pick: PICK) -> Built:
    (inputs, axis), outputs, bias = pick((6, -1), ((2, 3), (-2, -1))), pick(8, (2, 4), (4, 1, 2)), pick(True, False)
    flax_layer = nnx.LinearGeneral(inputs, outputs, axis=axis, use_bias=bias, rngs=rngs())
    return nn.Linear(6, 8, bias), flax_layer, (2, 5, 6)


def einsum(pick: PICK) -> Built:
    text, shape = pick(("...i,ihd->...hd", (6, 2, 4)), ("bljk,jko->blo", (2, 3, 8)), ("...jk,jkhd->...hd", (2, 3, 4, 2)))
    bias = pick(True, False)
    new = shape[2:] if shape[:2] == (2, 3) else shape[1:]
    return nn.Linear(6, 8, bias), nnx.Einsum(text, shape, new if bias else None, rngs=rngs()), (2, 5, 6)


def weight_norm(pick: PICK) -> Built:
    dim, kind = pick((0, -1), (1, -2), (None, None)), pick("Linear", "Conv", "ConvTranspose", "Square")
    bias, size = pick(True, False), 4 if kind == "Square" else 6
    if kind == "Conv":
        layers = nn.Conv1d(4, 6, 3, bias=bias), nnx.Conv(4, 6, (3,), padding="VALID", use_bias=bias, rngs=rngs())
    elif kind == "ConvTranspose":
        swapped = pick(True, False)
        layers = (
            nn.ConvTranspose1d(4, 6, 3, bias=bias),
            nnx.ConvTranspose(4, 6, (3,), padding="VALID", transpose_kernel=swapped, use_bias=bias, rngs=rngs()),
        )
        dim = dim if swapped or dim[0] is None else (dim[0], -3 - dim[1])
    else:
        layers = nn.Linear(4, size, bias), nnx.Linear(4, size, use_bias=bias, rngs=rngs())
    flax_layer = nnx.WeightNorm(layers[1], feature_axes=dim[1], epsilon=0.0, rngs=rngs())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        make = pick(parametrizations.weight_norm, nn.utils.weight_norm)
        torch_layer = make(layers[0], dim=dim[0])
    return torch_layer, flax_layer, (2, 4, 9) if "Conv" in kind else (2, 5, 4)


class FlaxWeightNorm(FlaxLayer):
    """A convolution has its channels last in Flax."""

    def __call__(self, x: Any) -> Any:
        linear = isinstance(self.layer.layer_instance, nnx.Linear | nnx.Embed)
        return self.layer(x) if linear else jnp.moveaxis(self.layer(jnp.moveaxis(x, 1, -1)), -1, 1)


# ---------------------------------------------------------------- attention


class TorchAttention(TorchLayer):
    """Outputs alone: Flax returns no attention weights."""

    def forward(self, *x: Any) -> Any:
        return self.layer(*x, need_weights=False)[0]


class FlaxAttention(FlaxLayer):
    def __call__(self, *x: Any) -> Any:
        return self.layer(*x, decode=False)


def attention(pick: PICK) -> Built:
    heads, bias, kdim = pick(1, 2, 4), pick(True, True, False), pick(None, 6)
    torch_layer = nn.MultiheadAttention(8, heads, bias=bias, kdim=kdim, vdim=kdim, batch_first=True)
    flax_layer = nnx.MultiHeadAttention(heads, 8, in_kv_features=kdim, use_bias=bias, rngs=rngs())
    return torch_layer, flax_layer, ((2, 5, 8), (2, 7, kdim or 8), (2, 7, kdim or 8))


# ---------------------------------------------------------------- recurrence


class TorchState(TorchLayer):
    """Everything that a cell or a layer returns, in one list: outputs, then the state."""

    def forward(self, x: Any, *state: Any) -> Any:
        found = self.layer(x, state if len(state) > 1 else state[0])
        flat = [
            part
            for one in (found if isinstance(found, tuple) else (found,))
            for part in (one if isinstance(one, tuple) else (one,))
        ]
        # A layer has an axis for its number of layers.
        return [part[0] if i and isinstance(self.layer, nn.RNNBase) else part for i, part in enumerate(flat)]


class FlaxState(FlaxLayer):
    def __call__(self, x: Any, *state: Any) -> Any:
        layer = isinstance(self.layer, nnx.RNN)
        state = tuple(one[0] for one in state) if layer else state
        # torch has h and c, Flax c and h.
        carry = state[::-1] if len(state) > 1 else state[0]
        new, y = self.layer(x, initial_carry=carry, return_carry=True) if layer else self.layer(carry, x)
        return ([y] if layer else []) + (list(new[::-1]) if isinstance(new, tuple) else [new])


STATES = (TorchState, FlaxState)
CELLS = {"GRU": (nnx.GRUCell,), "LSTM": (nnx.LSTMCell, nnx.OptimizedLSTMCell), "RNN": (nnx.SimpleCell,)}


def recurrent(name: str, layer: bool) -> Callable[[PICK], Built]:
    def build(pick: PICK) -> Built:
        activation = pick("tanh", "relu") if name == "RNN" else "tanh"
        options: dict[str, Any] = dict(nonlinearity=activation) if name == "RNN" else {}
        flax_options: dict[str, Any] = dict(activation_fn=nnx.relu if activation == "relu" else nnx.tanh)
        # Unlike the other cells it is made to compute in float32 whatever its arrays are.
        flax_options |= dict(dtype=None) if name == "RNN" else {}
        cell = pick(*CELLS[name])(3, 4, **flax_options, rngs=rngs())
        torch_layer = getattr(nn, name if layer else f"{name}Cell")(
            3, 4, **options, **(dict(batch_first=True) if layer else {})
        )
        states = ((1, 2, 4) if layer else (2, 4),) * (2 if name == "LSTM" else 1)
        return torch_layer, nnx.RNN(cell, rngs=False) if layer else cell, ((2, 5, 3) if layer else (2, 3), *states)

    return build


class TorchStack(TorchLayer):
    """All layers and directions at once; the states in the order in which torch stacks them."""

    def forward(self, x: Any) -> Any:
        y, state = self.layer(x)
        return [y, *(state if isinstance(state, tuple) else (state,))]


class FlaxStack(FlaxLayer):
    """The layers one after the other, however they are kept."""

    def __call__(self, x: Any) -> Any:
        one = not isinstance(self.layer, nnx.List | nnx.Sequential)
        states = []
        for layer in [self.layer] if one else getattr(self.layer, "layers", self.layer):
            carry, x = layer(x, return_carry=True)
            states += carry if isinstance(layer, nnx.Bidirectional) else [carry]
        if not isinstance(states[0], tuple):
            return [x, jnp.stack(states)]
        # torch has h and c, Flax c and h.
        return [x, jnp.stack([h for _, h in states]), jnp.stack([c for c, _ in states])]


def stack(name: str) -> Callable[[PICK], Built]:
    """Several layers or both directions, or both, with and without biases."""

    def build(pick: PICK) -> Built:
        count, both, bias = *pick((1, True), (2, False), (2, True), (3, True)), pick(True, False)
        time_major, kind = pick(True, False), pick(*CELLS[name])
        options: dict[str, Any] = dict(dtype=None) if name == "RNN" else {}

        def layer(width: int) -> nnx.Module:
            runs = [nnx.RNN(kind(width, 4, **options, rngs=rngs()), time_major=time_major) for _ in "lr"]
            return nnx.Bidirectional(*runs, time_major=time_major) if both else runs[0]

        layers = [layer(3 if i == 0 else 8 if both else 4) for i in range(count)]
        flax_layer = nnx.List(layers) if count > 1 and pick(True, False) else nnx.Sequential(*layers)
        torch_layer = getattr(nn, name)(*(3, 4, count), bias=bias, batch_first=not time_major, bidirectional=both)
        return torch_layer, layers[0] if count == 1 else flax_layer, (5, 2, 3) if time_major else (2, 5, 3)

    return build


CASES = [
    *(Case(f"torch.nn.Conv{n}d", conv(n)) for n in (1, 2, 3)),
    *(Case(f"torch.nn.ConvTranspose{n}d", conv_transpose(n)) for n in (1, 2, 3)),
    *(Case(f"torch.nn.BatchNorm{n}d", batch_norm(f"BatchNorm{n}d"), 2) for n in (1, 2, 3)),
    *(Case(f"torch.nn.InstanceNorm{n}d", instance_norm(n), 2) for n in (1, 2, 3)),
    Case("torch.nn.SyncBatchNorm", batch_norm("SyncBatchNorm"), 2),
    Case("torch.nn.Linear", linear_general, 6, None, (TorchLayer, FlaxFlat), "general"),
    Case("torch.nn.Linear", einsum, 5, None, (TorchLayer, FlaxFlat), "einsum"),
    Case(WEIGHT_NORM, weight_norm, 14, None, (TorchLayer, FlaxWeightNorm)),
    Case("torch.nn.GroupNorm", group_norm),
    Case("torch.nn.RMSNorm", rms_norm, 4, channels=None),
    Case("torch.nn.PReLU", prelu),
    *(Case(f"torch.nn.{n}Cell", recurrent(n, False), 2 + (n == "LSTM"), wrap=STATES) for n in CELLS),
    *(Case(f"torch.nn.{n}", recurrent(n, True), 2, wrap=STATES) for n in CELLS),
    *(Case(f"torch.nn.{n}", stack(n), 4, None, (TorchStack, FlaxStack), "stack") for n in CELLS),
    Case("torch.nn.MultiheadAttention", attention, 4, wrap=(TorchAttention, FlaxAttention)),
]
