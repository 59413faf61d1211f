"""What configurations every row of the ledger is tried on: a strategy for each, and a fault for each of its settings."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen, nnx
from helpers import random
from hypothesis import strategies as st
from linen_layers import LinenBothWays, LinenFlat, LinenLayer, LinenState
from rule_cases import (
    STATES,
    FlaxAttention,
    FlaxFlat,
    FlaxLayer,
    FlaxStack,
    FlaxWeightNorm,
    TorchAttention,
    TorchLayer,
    TorchStack,
    randomised,
)
from torch import nn
from torch.nn.utils import parametrizations

import parity
from parity.weights.computed import WEIGHT_NORM
from parity.weights.rules import RULES, Rule

Options = dict[str, Any]
Draw = Callable[[Any], Any]
FLOAT, WHOLE = torch.float32, torch.int64


@dataclass(frozen=True)
class Make:
    """A layer of Flax that is still to be made, its inner layers too.

    Attributes:
        cls: its class, of NNX or Linen.
        options: keyword arguments.
    """

    cls: Any
    options: Options

    def but(self, **options: Any) -> "Make":
        """The same with other options."""
        return replace(self, options=self.options | options)

    def __call__(self, rngs: nnx.Rngs | None = None) -> Any:
        def made(value: Any) -> Any:
            return value(rngs) if isinstance(value, Make) else [made(one) for one in value] if type(value) is list else value

        options = {name: made(value) for name, value in self.options.items()}
        if self.cls in (nnx.Sequential, nnx.List):
            return self.cls(*options["layers"]) if self.cls is nnx.Sequential else self.cls(options["layers"])
        wants = inspect.signature(self.cls).parameters if inspect.isfunction(self.cls) else self.parameters
        needed = "rngs" in wants and wants["rngs"].default is inspect.Parameter.empty
        return self.cls(**options, **(dict(rngs=rngs) if needed else {}))

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.cls.__init__).parameters


@dataclass(frozen=True)
class Configuration:
    """One configuration of a pair of layers that means the same on both sides, unless it says otherwise.

    Attributes:
        torch: keyword arguments of the torch layer.
        flax: the Flax layer.
        inputs: shapes, channels where torch has them.
        told: the beginning of what transfer has to say of the settings; '' if all agree.
        dtype: of the inputs.
        change: what is done to the torch layer once it is made.
        wraps: as of the family, if it is another.
    """

    torch: Options
    flax: Make
    inputs: tuple[tuple[int, ...], ...]
    told: str = ""
    dtype: torch.dtype = FLOAT
    change: Callable[[nn.Module], nn.Module] = field(default=lambda layer: layer)
    wraps: tuple[Any, Any, Any] | None = None

    def but(self, torch: Options | None = None, **flax: Any) -> "Configuration":
        """The same with other options."""
        return replace(self, torch=self.torch | (torch or {}), flax=self.flax.but(**flax))


# How a setting is put wrong, and what has to be told then.
Fault = tuple[Callable[[Configuration], Configuration], str]


@dataclass(frozen=True)
class Row:
    """A row of the ledger with one of its classes of Flax.

    Attributes:
        rule: the row.
        flax: public name of the class.
    """

    rule: Rule
    flax: str

    def __str__(self) -> str:
        return "-".join(name.removeprefix("torch.nn.").removeprefix("flax.") for name in (self.rule.torch, self.flax))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # What hypothesis prints of an example; a whole row of the ledger would hide the configuration.
        printer.text(str(self))

    @property
    def linen(self) -> bool:
        return self.flax.startswith("flax.linen.")

    @property
    def cls(self) -> Any:
        return getattr(linen if self.linen else nnx, self.flax.rpartition(".")[2])

    @property
    def family(self) -> "Family":
        return (
            STRATEGIES[self.rule.torch, "*"] if (self.rule.torch, "*") in STRATEGIES else STRATEGIES[self.rule.torch, self.flax]
        )

    @property
    def known(self) -> bool:
        """Whether there is a strategy."""
        return (self.rule.torch, "*") in STRATEGIES or (self.rule.torch, self.flax) in STRATEGIES

    def configurations(self) -> st.SearchStrategy[Configuration]:
        return st.composite(self.family.draw)(self)

    # ------------------------------------------------------------ layers

    def torch_layer(self, one: Configuration, seed: str = "source") -> nn.Module:
        """The torch layer in its wrapper, with random numbers in all that may have any."""
        layer = one.change(getattr(nn, self.rule.torch.rpartition(".")[2], nn.Identity)(**one.torch))
        return self.fitting(randomised(self.wraps(one)[0](layer), str(self), seed))

    def flax_layer(self, one: Configuration, x: tuple[torch.Tensor, ...]) -> Any:
        """The Flax layer in its wrapper, without values."""
        channels = self.family.channels
        if self.linen:
            return parity.Linen(self.wraps(one)[2](one.flax(), channels), None, *x)
        model = parity.empty(lambda rngs: self.wraps(one)[1](one.flax(rngs), channels))
        model.eval()
        return model

    def wraps(self, one: Configuration) -> tuple[Any, Any, Any]:
        return one.wraps or self.family.wraps

    def inputs(self, one: Configuration) -> tuple[torch.Tensor, ...]:
        rng = random("rows", str(self), one.inputs)
        if one.dtype == WHOLE:
            return tuple(torch.from_numpy(rng.integers(0, 5, shape)) for shape in one.inputs)
        return tuple(torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in one.inputs)

    def fitting(self, source: nn.Module) -> nn.Module:
        """The module, with numbers in the one part of the second bias that a GRU of Linen's has, zeros in all others."""
        with torch.no_grad():
            for path, value in source.state_dict().items():
                if "bias_hh" in path:
                    value.zero_()
                    if self.linen and self.rule.torch.startswith("torch.nn.GRU"):
                        third = len(value) // 3
                        value[2 * third :] = torch.arange(1, third + 1) / 8
        return source


@dataclass(frozen=True)
class Family:
    """Rows that are tried alike.

    Attributes:
        draw: a configuration.
        faults: how each setting of the row is put wrong, by the words of the setting.
        wraps: what stands around the layer in torch, in NNX and in Linen.
        channels: the axis of the channels in torch, None where it is the last one.
    """

    draw: Callable[[Draw, Row], Configuration]
    faults: Mapping[str, Fault] = field(default_factory=dict)
    wraps: tuple[Any, Any, Any] = (TorchLayer, FlaxLayer, LinenLayer)
    channels: int | None = 1


def flag(draw: Draw, first: bool = True) -> bool:
    return draw(st.sampled_from((first, not first)))


def one_of(draw: Draw, *choices: Any) -> Any:
    return draw(st.sampled_from(choices))


def per_axis(draw: Draw, count: int, *choices: Any) -> tuple[Any, ...]:
    return tuple(one_of(draw, *choices) for _ in range(count))


# ---------------------------------------------------------------- linear layers


def linear(draw: Draw, row: Row) -> Configuration:
    (inputs, outputs), bias = one_of(draw, (4, 5), (4, 4), (3, 1)), flag(draw)
    sizes = dict(features=outputs) if row.linen else dict(in_features=inputs, out_features=outputs)
    made = Make(row.cls, dict(**sizes, use_bias=bias))
    return Configuration(dict(in_features=inputs, out_features=outputs, bias=bias), made, ((2, 5, inputs),))


def general(draw: Draw, row: Row) -> Configuration:
    (inputs, axis), outputs, bias = one_of(draw, ((2, 3), (-2, -1)), (6, -1)), one_of(draw, (2, 4), 8, (4, 1, 2)), flag(draw)
    sizes = dict(features=outputs) if row.linen else dict(in_features=inputs, out_features=outputs)
    made = Make(row.cls, sizes | dict(axis=axis, use_bias=bias))
    return Configuration(dict(in_features=6, out_features=8, bias=bias), made, ((2, 5, 6),))


def einsum(draw: Draw, row: Row) -> Configuration:
    texts = ("...jk,jkhd->...hd", (2, 3, 4, 2)), ("...i,ihd->...hd", (6, 2, 4)), ("bljk,jko->blo", (2, 3, 8))
    (text, shape), bias = one_of(draw, *texts), flag(draw)
    new = shape[2:] if shape[:2] == (2, 3) else shape[1:]
    sizes = dict(shape=shape, use_bias=bias) if row.linen else dict(kernel_shape=shape, bias_shape=new if bias else None)
    made = Make(row.cls, sizes | dict(einsum_str=text))
    return Configuration(dict(in_features=6, out_features=8, bias=bias), made, ((2, 5, 6),))


def embedding(draw: Draw, row: Row) -> Configuration:
    count, width = one_of(draw, (5, 3), (5, 5), (7, 1))
    made = Make(row.cls, dict(num_embeddings=count, features=width))
    return Configuration(dict(num_embeddings=count, embedding_dim=width), made, ((2, 5),), dtype=WHOLE)


def dropout(draw: Draw, row: Row) -> Configuration:
    rate = one_of(draw, 0.25, 0.0, 0.5)
    return Configuration(dict(p=rate), Make(row.cls, dict(rate=rate, deterministic=True)), ((2, 5, 3),))


def prelu(draw: Draw, row: Row) -> Configuration:
    count = 1 if row.linen else one_of(draw, 1, 4)
    init = dict(negative_slope_init=jnp.zeros(count) if count > 1 else 0.0)
    return Configuration(dict(num_parameters=count), Make(row.cls, {} if row.linen else init), ((3, 4, 5),))


# ---------------------------------------------------------------- convolutions

SPACE = {1: (9,), 2: (8, 7), 3: (6, 5, 6)}
CHANNELS = ((4, 6, 1), (4, 6, 2), (4, 4, 4), (3, 6, 3), (4, 4, 1))


def pairs(torch_padding: Any, spread: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Padding in numbers, low and high, of a kernel that spans one more than `spread`."""
    if isinstance(torch_padding, str):
        return tuple((s // 2, s - s // 2) if torch_padding == "same" else (0, 0) for s in spread)
    return tuple((p, p) for p in torch_padding)


def spellings(numbers: tuple[tuple[int, int], ...]) -> tuple[Any, ...]:
    """Other ways to write padding in numbers in Flax."""
    symmetric = all(low == high for low, high in numbers)
    same = symmetric and len(set(numbers)) == 1
    nothing = not any(map(any, numbers))
    return (
        *([tuple(p for p, _ in numbers)] if symmetric else []),
        *([numbers[0][0]] if same else []),
        *(["VALID"] if nothing else []),
    )


def conv(ndim: int) -> Callable[[Draw, Row], Configuration]:
    def build(draw: Draw, row: Row) -> Configuration:
        mode = one_of(draw, "zeros", "zeros", "circular", "reflect", "replicate")
        kernel, dilation = per_axis(draw, ndim, 3, 2, 1), per_axis(draw, ndim, 1, 2)
        spread = tuple(d * (k - 1) for d, k in zip(dilation, kernel))
        padding = one_of(draw, per_axis(draw, ndim, 1, 0, 2), tuple(s // 2 for s in spread), "same", "valid")
        stride = (1,) * ndim if padding == "same" else per_axis(draw, ndim, 1, 2, 3)
        numbers = pairs(padding, spread)
        # Flax pads around only by halves of the kernel, and never with the value at the edge.
        names = {"circular": "CIRCULAR", "reflect": "REFLECT"}
        half = tuple((s // 2, s - s // 2) for s in spread)
        told, flax_padding = "", one_of(draw, numbers, *(spellings(numbers)))
        if mode == "zeros" and numbers == half and stride == (1,) * ndim:
            flax_padding = one_of(draw, "SAME", numbers)
        elif mode != "zeros" and any(map(any, numbers)):
            fits = mode in names and numbers == half
            flax_padding = names.get(mode, "CIRCULAR")
            told = "" if fits else f"padding={padding!r}, padding_mode={mode!r} in torch"
        (inputs, outputs, groups), bias = one_of(draw, *CHANNELS), flag(draw)
        options = dict(strides=one_of(draw, stride, *(stride[:1] if len(set(stride)) == 1 and not row.linen else ())))
        options |= dict(kernel_size=kernel, padding=flax_padding, kernel_dilation=dilation, feature_group_count=groups)
        sizes = dict(features=outputs) if row.linen else dict(in_features=inputs, out_features=outputs)
        theirs = dict(kernel_size=kernel, stride=stride, padding=padding, dilation=dilation, groups=groups, padding_mode=mode)
        theirs |= dict(in_channels=inputs, out_channels=outputs, bias=bias)
        return Configuration(theirs, Make(row.cls, sizes | options | dict(use_bias=bias)), ((2, inputs, *SPACE[ndim]),), told)

    return build


def conv_transpose(ndim: int) -> Callable[[Draw, Row], Configuration]:
    def build(draw: Draw, row: Row) -> Configuration:
        kernel, stride, dilation = per_axis(draw, ndim, 3, 2, 1), per_axis(draw, ndim, 2, 1, 3), per_axis(draw, ndim, 1, 2)
        padding = per_axis(draw, ndim, 1, 0, 2)
        # torch wants less than stride or dilation.
        extra = tuple(one_of(draw, *range(max(s, d))) for s, d in zip(stride, dilation))
        (inputs, outputs), bias = one_of(draw, (4, 5), (4, 4), (2, 6)), flag(draw)
        # More padding than the kernel reaches over crops the output, in Flax by negative numbers.
        ends = [d * (k - 1) - p for k, d, p in zip(kernel, dilation, padding)]
        numbers = tuple((end, end + more) for end, more in zip(ends, extra))
        theirs = dict(kernel_size=kernel, stride=stride, padding=padding, output_padding=extra, dilation=dilation, bias=bias)
        sizes = dict(features=outputs) if row.linen else dict(in_features=inputs, out_features=outputs)
        ours = dict(kernel_size=kernel, strides=stride, padding=numbers, kernel_dilation=dilation, use_bias=bias)
        made = Make(row.cls, sizes | ours | dict(transpose_kernel=flag(draw, False)))
        shape = 2, inputs, *(size - 1 for size in SPACE[ndim])
        return Configuration(theirs | dict(in_channels=inputs, out_channels=outputs), made, (shape,))

    return build


# ---------------------------------------------------------------- normalisation

EPSILONS = (1e-5, 1e-3, 0.5)
IMAGE = {1: (5,), 2: (4, 3), 3: (3, 2, 2)}
EXACT = dict(use_fast_variance=False)


def affine(draw: Draw, bias_alone: bool = False) -> tuple[Options, Options]:
    """Which of scale and bias there are, in torch's words and in Flax's; where torch can, a scale without a bias too."""
    choices = ((True, True), (False, False), *(((True, False),) if bias_alone else ()))
    scale, bias = one_of(draw, *choices)
    return dict(elementwise_affine=scale, bias=bias) if bias_alone else dict(affine=scale), dict(use_scale=scale, use_bias=bias)


def sized(row: Row, count: int) -> Options:
    return {} if row.linen else dict(num_features=count)


def batch_norm(ndim: int) -> Callable[[Draw, Row], Configuration]:
    def build(draw: Draw, row: Row) -> Configuration:
        eps, momentum, (theirs, ours) = one_of(draw, *EPSILONS), one_of(draw, 0.1, 0.01, 0.3, 1.0), affine(draw)
        shape = (3, 6) if ndim == 1 and flag(draw, False) else (3, 6, *IMAGE[ndim])
        options = sized(row, 6) | ours | EXACT | dict(epsilon=eps, momentum=1 - momentum, use_running_average=True)
        return Configuration(dict(num_features=6, eps=eps, momentum=momentum) | theirs, Make(row.cls, options), (shape,))

    return build


def instance_norm(ndim: int) -> Callable[[Draw, Row], Configuration]:
    def build(draw: Draw, row: Row) -> Configuration:
        eps, (theirs, ours) = one_of(draw, *EPSILONS), affine(draw)
        options = sized(row, 6) | ours | EXACT | dict(epsilon=eps)
        return Configuration(dict(num_features=6, eps=eps) | theirs, Make(row.cls, options), ((3, 6, *IMAGE[ndim]),))

    return build


def group_norm(draw: Draw, row: Row) -> Configuration:
    eps, groups, (theirs, ours) = one_of(draw, *EPSILONS), one_of(draw, 2, 1, 3, 6), affine(draw)
    by = dict(num_groups=None, group_size=6 // groups) if flag(draw, False) else dict(num_groups=groups)
    options = sized(row, 6) | by | ours | EXACT | dict(epsilon=eps)
    shape = one_of(draw, (3, 6, 4), (3, 6, 4, 3), (3, 6, 3, 2, 2))
    return Configuration(dict(num_groups=groups, num_channels=6, eps=eps) | theirs, Make(row.cls, options), (shape,))


def last_axes(draw: Draw, row: Row, has_scale: bool) -> tuple[Any, Options]:
    """The shape that torch normalises, and the axes that Flax does; NNX has a scale for a single axis only."""
    count = one_of(draw, 1, 2) if row.linen or not has_scale else 1
    axes = tuple(range(-count, 0))
    shape = (5, 6)[-count:]
    return one_of(draw, shape, *shape[1 - count :][: 2 - count]), dict(
        reduction_axes=axes, feature_axes=axes
    ) if count > 1 else {}


def layer_norm(draw: Draw, row: Row) -> Configuration:
    eps, (theirs, ours) = one_of(draw, *EPSILONS), affine(draw, True)
    shape, axes = last_axes(draw, row, ours["use_scale"])
    options = sized(row, 6) | ours | EXACT | axes | dict(epsilon=eps)
    return Configuration(dict(normalized_shape=shape, eps=eps) | theirs, Make(row.cls, options), ((3, 5, 6),))


def rms_norm(draw: Draw, row: Row) -> Configuration:
    eps, scale = one_of(draw, None, *EPSILONS), flag(draw)
    shape, axes = last_axes(draw, row, scale)
    options = sized(row, 6) | axes | dict(epsilon=eps or 2.0**-23, use_scale=scale)
    theirs = dict(normalized_shape=shape, eps=eps, elementwise_affine=scale)
    return Configuration(theirs, Make(row.cls, options), ((3, 5, 6),))


WEIGHT_NORMS: Mapping[str, tuple[Any, Options]] = {
    "Linear": (nn.Linear, dict(in_features=4, out_features=6)),
    "Square": (nn.Linear, dict(in_features=4, out_features=4)),
    "Conv": (nn.Conv1d, dict(in_channels=4, out_channels=6, kernel_size=3)),
    "ConvTranspose": (nn.ConvTranspose1d, dict(in_channels=4, out_channels=6, kernel_size=3)),
    "Embed": (nn.Embedding, dict(num_embeddings=5, embedding_dim=4)),
}


def weight_norm(draw: Draw, row: Row) -> Configuration:
    dim, kind, make = one_of(draw, 0, 1, None), one_of(draw, *WEIGHT_NORMS), one_of(draw, PARAMETRISED, old_weight_norm)
    cls, options = WEIGHT_NORMS[kind]
    bias, swapped = flag(draw), kind == "ConvTranspose" and flag(draw)
    # Outputs are torch's first axis and Flax's last, but for a transposed convolution and a table.
    as_in_torch = kind == "Embed" or (kind == "ConvTranspose" and not swapped)
    axis = None if dim is None else dim - 2 if as_in_torch else -1 - dim
    inner: Options = dict(in_features=4, out_features=options.get("out_features", 6), use_bias=bias)
    filtered: Options = {}
    if kind == "Embed":
        inner, filtered = dict(num_embeddings=5, features=4), dict(variable_filter=nnx.PathContains("embedding"))
    if "Conv" in kind:
        inner |= dict(kernel_size=(3,), padding="VALID") | (dict(transpose_kernel=swapped) if kind == "ConvTranspose" else {})
    flax_cls = nnx.Linear if kind in ("Linear", "Square") else getattr(nnx, kind)
    theirs = options if kind == "Embed" else options | dict(bias=bias)
    made = Make(row.cls, dict(layer_instance=Make(flax_cls, inner), feature_axes=axis, epsilon=0.0, **filtered))
    shape = (2, 4, 9) if "Conv" in kind else (2, 5, 4)
    dtype = WHOLE if kind == "Embed" else FLOAT
    return Configuration({}, made, (shape,), dtype=dtype, change=lambda _: make(cls(**theirs), dim=dim))


PARAMETRISED = parametrizations.weight_norm


def other_axis(one: Configuration) -> Configuration:
    """The norms of the other axis of a square weight: no shape tells them."""
    square = Make(nnx.Linear, dict(in_features=4, out_features=4))
    wrong = replace(one, change=lambda _: parametrizations.weight_norm(nn.Linear(4, 4), dim=0))
    return wrong.but(layer_instance=square, feature_axes=-2)


def old_weight_norm(layer: nn.Module, dim: int | None) -> nn.Module:
    """By hooks; torch warns that it is old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer, dim=dim)


# ---------------------------------------------------------------- attention


def attention(draw: Draw, row: Row) -> Configuration:
    heads, bias, kdim, rate = one_of(draw, 2, 1, 4), flag(draw), one_of(draw, None, 6), one_of(draw, 0.0, 0.25)
    theirs = dict(embed_dim=8, num_heads=heads, bias=bias, kdim=kdim, vdim=kdim, dropout=rate, batch_first=True)
    ours = dict(num_heads=heads, use_bias=bias, dropout_rate=rate, broadcast_dropout=False, deterministic=True)
    sizes = dict(qkv_features=8, out_features=8) if row.linen else dict(in_features=8, in_kv_features=kdim)
    cls = one_of(draw, row.cls, *((linen.MultiHeadAttention,) if row.linen else ()))
    return Configuration(theirs, Make(cls, ours | sizes), ((2, 5, 8), (2, 7, kdim or 8), (2, 7, kdim or 8)))


# ---------------------------------------------------------------- recurrence

CELLS = {"GRU": ("GRUCell",), "LSTM": ("LSTMCell", "OptimizedLSTMCell"), "RNN": ("SimpleCell",)}


def cell(draw: Draw, row: Row, cls: Any, inputs: int, hidden: int) -> tuple[Options, Make]:
    """The options of torch and the cell."""
    relu = row.rule.torch.startswith("torch.nn.RNN") and flag(draw, False)
    sizes = dict(features=hidden) if row.linen else dict(in_features=inputs, hidden_features=hidden)
    # NNX makes this cell compute in float32 whatever its arrays are, unless it is told otherwise.
    options: Options = dict(activation_fn=jax.nn.relu) if relu else {}
    options |= dict(dtype=None) if cls is nnx.SimpleCell else {}
    return dict(nonlinearity="relu") if relu else {}, Make(cls, sizes | options)


def recurrent_cell(draw: Draw, row: Row) -> Configuration:
    (inputs, hidden), bias = one_of(draw, (3, 4), (4, 4)), flag(draw)
    theirs, made = cell(draw, row, row.cls, inputs, hidden)
    states = ((2, hidden),) * (2 if "LSTM" in row.rule.torch else 1)
    return Configuration(dict(input_size=inputs, hidden_size=hidden, bias=bias) | theirs, made, ((2, inputs), *states))


def recurrent(draw: Draw, row: Row) -> Configuration:
    """One layer that is given a state, or several of NNX."""
    name = row.rule.torch.rpartition(".")[2]
    if not row.linen and flag(draw, False):
        return stack(draw, row, 2, both=False)
    (inputs, hidden), bias, first = one_of(draw, (3, 4), (4, 4)), flag(draw), flag(draw)
    theirs, inner = cell(draw, row, getattr(linen if row.linen else nnx, one_of(draw, *CELLS[name])), inputs, hidden)
    theirs |= dict(input_size=inputs, hidden_size=hidden, bias=bias, batch_first=first)
    made = Make(row.cls, dict(cell=inner, time_major=not first))
    states = ((1, 2, hidden),) * (2 if name == "LSTM" else 1)
    return Configuration(theirs, made, ((2, 5, inputs) if first else (5, 2, inputs), *states))


def both_ways(draw: Draw, row: Row) -> Configuration:
    """One layer or several, each in both directions."""
    return stack(draw, row, 1 if row.linen else one_of(draw, 1, 2), both=True)


def stack(draw: Draw, row: Row, count: int, both: bool) -> Configuration:
    name = row.rule.torch.rpartition(".")[2]
    bias, first = flag(draw), flag(draw)
    lib = linen if row.linen else nnx
    theirs, inner = cell(draw, row, getattr(lib, one_of(draw, *CELLS[name])), 3, 4)

    def layer(width: int) -> Make:
        ways = [
            Make(lib.RNN, dict(cell=inner if row.linen else inner.but(in_features=width), time_major=not first)) for _ in "lr"
        ]
        return (
            Make(lib.Bidirectional, dict(forward_rnn=ways[0], backward_rnn=ways[1], time_major=not first)) if both else ways[0]
        )

    theirs |= dict(input_size=3, hidden_size=4, num_layers=count, bias=bias, batch_first=first, bidirectional=both)
    layers = [layer(3 if number == 0 else 8 if both else 4) for number in range(count)]
    made = Make(one_of(draw, nnx.Sequential, nnx.List), dict(layers=layers)) if count > 1 else layers[0]
    return Configuration(theirs, made, ((2, 5, 3) if first else (5, 2, 3),), wraps=(TorchStack, FlaxStack, LinenBothWays))


# ---------------------------------------------------------------- what a setting looks like that does not agree


def flax_wrong(told: str, **options: Any) -> Fault:
    return lambda one: one.but(**options), told


def torch_wrong(told: str, **options: Any) -> Fault:
    return lambda one: one.but(options), told


def cube_wrong(told: str, **options: Any) -> Fault:
    """An option of a layer whose inputs are as long in space as they have channels: no shape tells one from the other."""

    def put(one: Configuration) -> Configuration:
        batch, *sizes = one.inputs[0]
        return replace(one, inputs=((batch, *sizes[:1] * max(2, len(sizes))),)).but(**options)

    return put, told


def cell_wrong(told: str, **options: Any) -> Fault:
    """A setting of a cell, which may stand in a layer that runs it."""

    def put(one: Configuration) -> Configuration:
        inner = one.flax.options.get("cell")
        return one.but(cell=inner.but(**options)) if inner else one.but(**options)

    return put, told


def turned(name: str) -> Callable[[Configuration], Configuration]:
    return lambda one: one.but(**{name: not one.flax.options.get(name, False)})


EPS: dict[str, Fault] = {"eps, epsilon": flax_wrong("eps=", epsilon=1e-6)}
FAST: dict[str, Fault] = {"flax: use_fast_variance=False": flax_wrong("use_fast_variance=True in Flax", use_fast_variance=True)}


def convolution_faults(ndim: int) -> dict[str, Fault]:
    return {
        "stride, strides": flax_wrong("stride=", strides=(4,) * ndim),
        "dilation, kernel_dilation": flax_wrong("dilation=", kernel_dilation=(5,) * ndim),
        "flax: mask=None": (masked, "mask"),
    }


def masked(one: Configuration) -> Configuration:
    """A mask of the kernel's shape, of ones: what it holds makes no difference."""
    theirs, transposed = one.torch, one.flax.options.get("transpose_kernel")
    inputs, outputs = theirs["in_channels"] // theirs.get("groups", 1), theirs["out_channels"]
    shape = *theirs["kernel_size"], *((outputs, inputs) if transposed else (inputs, outputs))
    return one.but(mask=jnp.ones(shape))


def spread(one: Configuration) -> Configuration:
    """An input with zeros in between. With a padding that is no number flax does not take it."""
    ndim = len(one.torch["kernel_size"])
    return one.but(dict(padding=0, padding_mode="zeros"), input_dilation=(2,) * ndim, padding=((0, 0),) * ndim)


def conv_faults(ndim: int) -> dict[str, Fault]:
    return convolution_faults(ndim) | {
        "padding, padding_mode, padding in numbers": flax_wrong("padding=", padding=((7, 6),) * ndim),
        "groups, feature_group_count": (regrouped, "groups="),
        "input_dilation=1": (spread, "input_dilation="),
    }


def regrouped(one: Configuration) -> Configuration:
    """A depthwise kernel and one of a single input channel have the same shape."""
    channels = dict(in_channels=1, out_channels=6, groups=1)
    wide = replace(one, torch=one.torch | channels, inputs=((one.inputs[0][0], 6, *one.inputs[0][2:]),))
    sizes = dict(features=6) if "features" in one.flax.options else dict(in_features=6, out_features=6)
    return wide.but(**sizes, feature_group_count=6)


def conv_transpose_faults(ndim: int) -> dict[str, Fault]:
    return convolution_faults(ndim) | {
        "padding, output_padding, padding in numbers (k - 1 - p)": flax_wrong("padding=", padding="CIRCULAR"),
        "torch: groups=1": torch_wrong("groups=2 in torch", groups=2, in_channels=4, out_channels=4),
    }


BATCH_NORM = (
    EPS
    | FAST
    | {
        "torch: track_running_stats=True": torch_wrong("track_running_stats=False in torch", track_running_stats=False),
        "momentum, 1 - momentum": flax_wrong("momentum=", momentum=0.55),
        "flax: axis=-1": cube_wrong("axis=1 in Flax", axis=1),
    }
)
INSTANCE_NORM = (
    EPS
    | FAST
    | {
        "flax: feature_axes=-1": cube_wrong("feature_axes=1 in Flax", feature_axes=1),
        "torch: track_running_stats=False": torch_wrong("track_running_stats=True in torch", track_running_stats=True),
    }
)


def other_groups(one: Configuration) -> Configuration:
    return one.but(num_groups=3 if one.torch["num_groups"] != 3 else 2, group_size=None)


def other_rate(one: Configuration) -> Configuration:
    return one.but(rate=0.75)


ATTENTION = {
    "num_heads": torch_wrong("num_heads=8", num_heads=8),
    "num_heads, num_kv_heads": torch_wrong("num_heads=8", num_heads=8),
    "kdim=vdim": torch_wrong("kdim=6 and vdim=4", kdim=6, vdim=4),
    "torch: add_zero_attn=False": torch_wrong("add_zero_attn=True in torch", add_zero_attn=True),
    "torch: batch_first=True": torch_wrong("batch_first=False in torch", batch_first=False),
    "flax: normalize_qk=False": flax_wrong("layer.query_ln.scale", normalize_qk=True),
    "dropout, dropout_rate, broadcast_dropout": flax_wrong("dropout=", dropout_rate=0.75),
}
CELL = {"nonlinearity, gate_fn, activation_fn, residual": cell_wrong("activation_fn is ", activation_fn=jnp.sin)}
SEVERAL = {
    "torch: num_layers=1": torch_wrong("num_layers=2 in torch", num_layers=2),
    "torch: proj_size=0": torch_wrong("proj_size=2 in torch", proj_size=2),
}
LAYER_FAULTS = (
    CELL
    | SEVERAL
    | {
        "batch_first, time_major; reverse=False": flax_wrong("reverse=True in Flax", reverse=True),
        "torch: bidirectional=False": torch_wrong("bidirectional=True in torch", bidirectional=True),
    }
)


def single(fault: Fault) -> Fault:
    """A fault of a stack's only layer."""

    def put(one: Configuration) -> Configuration:
        layers = one.flax.options.get("layers")
        # Of several the first one: it takes the same inputs.
        return fault[0](replace(one, torch=one.torch | dict(num_layers=1), flax=layers[0]) if layers else one)

    return put, fault[1]


BOTH = {
    name: single(fault)
    for name, fault in {
        "torch: num_layers=1": torch_wrong("num_layers=2 in torch", num_layers=2),
        "torch: proj_size=0": torch_wrong("proj_size=2 in torch", proj_size=2),
        "torch: bidirectional=True": torch_wrong("bidirectional=False in torch", bidirectional=False),
        "batch_first, time_major": (turned("time_major"), "batch_first="),
        "merge_fn": flax_wrong("merge_fn=add in Flax", merge_fn=jnp.add),
    }.items()
}
LAYER = {name: single(fault) for name, fault in LAYER_FAULTS.items()}
AXES = {
    "normalized_shape, reduction_axes, feature_axes": flax_wrong("normalized_shape=", reduction_axes=(0,), feature_axes=-1),
}

# What has no counterpart, by the beginning of its name: how the torch layer comes to have it.
ALONE = {"bias_hh": dict(bias=True), "bias_": dict(add_bias_kv=True), "running": dict(track_running_stats=True)}
ALONE["num_batches_tracked"] = ALONE["running"]


def exchanged_axes(one: Configuration) -> Configuration:
    """The last two axes in the other order."""
    return one.but(axis=(-1, -2))


STRATEGIES: dict[tuple[str, str], Family] = {
    ("torch.nn.Linear", "flax.nnx.Linear"): Family(linear, channels=None),
    ("torch.nn.Linear", "flax.linen.Dense"): Family(linear, channels=None),
    ("torch.nn.Linear", "flax.nnx.LinearGeneral"): Family(
        general,
        {"axis: the last ones, batch_axis: none": flax_wrong("axis=(-1, -2) in Flax", in_features=(2, 3), axis=(-1, -2))},
        (TorchLayer, FlaxFlat, None),
        None,
    ),
    ("torch.nn.Linear", "flax.linen.DenseGeneral"): Family(
        general,
        {"axis: the last ones, batch_axis: none": (exchanged_axes, "axis=(-1, -2) in Flax")},
        (TorchLayer, FlaxLayer, LinenFlat),
        None,
    ),
    ("torch.nn.Linear", "flax.linen.Einsum"): Family(
        einsum,
        {
            "einsum_str: ...inputs, inputs outputs -> ...outputs": flax_wrong(
                "einsum_str=", einsum_str="...kj,jkhd->...hd", shape=(3, 2, 4, 2)
            )
        },
        (TorchLayer, FlaxLayer, LinenFlat),
        None,
    ),
    ("torch.nn.Linear", "flax.nnx.Einsum"): Family(
        einsum,
        {
            "einsum_str: ...inputs, inputs outputs -> ...outputs": flax_wrong(
                "einsum_str=", einsum_str="...kj,jkhd->...hd", kernel_shape=(2, 3, 4, 2)
            )
        },
        (TorchLayer, FlaxFlat, None),
        None,
    ),
    ("torch.nn.LayerNorm", "*"): Family(layer_norm, EPS | FAST | AXES, channels=None),
    ("torch.nn.RMSNorm", "*"): Family(rms_norm, {"eps, epsilon": flax_wrong("eps=", epsilon=1e-6)} | AXES, channels=None),
    ("torch.nn.Embedding", "*"): Family(
        embedding,
        {
            "torch: padding_idx=None": torch_wrong("padding_idx=1 in torch", padding_idx=1),
            "torch: max_norm=None": torch_wrong("max_norm=2.0 in torch", max_norm=2.0),
            "torch: scale_grad_by_freq=False": torch_wrong("scale_grad_by_freq=True in torch", scale_grad_by_freq=True),
        },
        channels=None,
    ),
    ("torch.nn.Dropout", "*"): Family(
        dropout,
        {
            "p, rate": (other_rate, "p="),
            "flax: broadcast_dims=()": flax_wrong("broadcast_dims=(0,) in Flax", broadcast_dims=(0,)),
        },
        channels=None,
    ),
    **{(f"torch.nn.Conv{n}d", "*"): Family(conv(n), conv_faults(n)) for n in (1, 2, 3)},
    **{(f"torch.nn.ConvTranspose{n}d", "*"): Family(conv_transpose(n), conv_transpose_faults(n)) for n in (1, 2, 3)},
    **{(f"torch.nn.BatchNorm{n}d", "*"): Family(batch_norm(n), BATCH_NORM) for n in (1, 2, 3)},
    ("torch.nn.SyncBatchNorm", "*"): Family(batch_norm(2), BATCH_NORM),
    **{(f"torch.nn.InstanceNorm{n}d", "*"): Family(instance_norm(n), INSTANCE_NORM) for n in (1, 2, 3)},
    ("torch.nn.GroupNorm", "*"): Family(
        group_norm,
        EPS
        | FAST
        | {
            "num_groups, group_size": (other_groups, "num_groups="),
            "flax: reduction_axes=None": flax_wrong("reduction_axes=(-1,) in Flax", reduction_axes=(-1,)),
        },
    ),
    ("torch.nn.PReLU", "*"): Family(prelu),
    ("torch.nn.MultiheadAttention", "*"): Family(attention, ATTENTION, (TorchAttention, FlaxAttention, LinenLayer), None),
    **{(f"torch.nn.{n}Cell", "*"): Family(recurrent_cell, CELL, (*STATES, LinenState)) for n in CELLS},
    **{
        (f"torch.nn.{n}", f"flax.{lib}.RNN"): Family(recurrent, LAYER, (*STATES, LinenState))
        for n in CELLS
        for lib in ("nnx", "linen")
    },
    **{
        (f"torch.nn.{n}", f"flax.{lib}.Bidirectional"): Family(both_ways, BOTH, channels=None)
        for n in CELLS
        for lib in ("nnx", "linen")
    },
    (WEIGHT_NORM, "flax.nnx.WeightNorm"): Family(
        weight_norm,
        {
            "dim, feature_axes": (other_axis, "weight_norm with dim=0 in torch, feature_axes=-2 in Flax"),
            "flax: epsilon=0.0": flax_wrong("epsilon=0.5 in Flax", epsilon=0.5),
            "flax: use_scale=True": flax_wrong("use_scale=False keeps no norm", use_scale=False),
        },
        (TorchLayer, FlaxWeightNorm, None),
        None,
    ),
}

ROWS = [Row(rule, name) for rule in RULES for name in (rule.flax, rule.linen) if name]
