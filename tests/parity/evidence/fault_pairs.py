"""Pairs with one planted fault in the Flax code each, and what the diagnosis must say of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from evidence_pairs import attention, attention_inputs, block, draw, low_variance, normal, random
from flax import nnx
from torch import nn
from torch.nn.utils import parametrizations

import parity


class TorchStage(nn.Module):
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class FlaxStage(nnx.Module):
    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class TorchHolder(nn.Module):
    """One module under the path `core`."""

    def __init__(self, core: Any):
        super().__init__()
        self.core = core if isinstance(core, nn.Module) else TorchStage(core)

    def forward(self, *args, **kwargs):
        return self.core(*args, **kwargs)


class FlaxHolder(nnx.Module):
    def __init__(self, core: Any):
        self.core = core if isinstance(core, nnx.Module) else FlaxStage(core)

    def __call__(self, *args, **kwargs):
        return self.core(*args, **kwargs)


@dataclass(frozen=True)
class Planted:
    """A pair with a fault.

    Attributes:
        name: of the fault.
        pair: makes the two models, weights transferred.
        inputs: of both.
        cause: name of the hypothesis that must come first.
        says: what its sentences must hold.
        path: of the module that must be named, and no other.
        options: of `parity.diagnose`.
    """

    name: str
    pair: Callable[[], tuple[Any, Any]]
    inputs: tuple[Any, ...]
    cause: str
    says: str = ""
    path: str = "core"
    options: tuple[tuple[str, Any], ...] = ()


def held(torch_core: Any, flax_core: Any, name: str, **options: Any) -> tuple[Any, Any]:
    torch_model, flax_model = draw(TorchHolder(torch_core), name), FlaxHolder(flax_core)
    with torch.no_grad():
        # Flax's layers of this kind have one bias.
        for path, parameter in torch_model.named_parameters():
            parameter.mul_(0 if path.endswith("bias_hh_l0") else 1)
    for path, buffer in torch_model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.from_numpy(random("buffer", path).uniform(0.5, 1.5, tuple(buffer.shape))))
    flax_model.eval()
    if torch_model.state_dict():
        parity.transfer(torch_model, flax_model, **options)
    return torch_model, flax_model


def functions(name: str, right: Any, wrong: Any, inputs: Any, cause: str, says: str = "") -> Planted:
    """Two functions without parameters."""
    return Planted(name, lambda: held(right, wrong, name), inputs, cause, says)


def layers(name: str, right: Any, wrong: Any, inputs: Any, cause: str, says: str = "", **options: Any) -> Planted:
    """Two layers, made anew each time."""
    return Planted(name, lambda: held(right(), wrong(nnx.Rngs(0)), name, **options), inputs, cause, says)


def spoiled(planted: str, right: Any, made: Any, change: Any, inputs: Any, cause: str, says: str = "") -> Planted:
    """Two right layers, and then something is done to Flax's."""

    def build() -> tuple[Any, Any]:
        pair = held(right(), made(nnx.Rngs(0)), planted)
        change(pair[1].core)
        return pair

    return Planted(planted, build, inputs, cause, says)


X, Y = normal(3, 4, 8), normal(3, 4, 8, name="y")
SEQUENCES = tuple(normal(3, 2, 5, 4, name=name) for name in "qkv")
CAUSAL = np.triu(np.ones((5, 5), bool), 1)
PADDING = np.arange(5) >= np.array([[5], [4], [2]])
IMAGE = normal(2, 3, 6, 6)
FEATURES = normal(2, 3, 4, 6)


def near_zero(x: np.ndarray) -> np.ndarray:
    return (x * 0.01).astype(np.float32)


# ---------------------------------------------------------------- norms

NORMS = [
    Planted("LayerNorm epsilon", lambda: block("epsilon"), (low_variance(3, 4, 8),), "epsilon", "set epsilon=1e-05", "norm"),
    layers(
        "LayerNorm epsilon of no usual size",
        lambda: nn.LayerNorm(8),
        lambda rngs: nnx.LayerNorm(8, epsilon=3.7e-4, use_fast_variance=False, rngs=rngs),
        (X,),
        "epsilon",
        "0.00037",
    ),
    layers(
        "BatchNorm epsilon",
        lambda: nn.BatchNorm1d(8),
        lambda rngs: nnx.BatchNorm(8, epsilon=1e-3, momentum=0.9, use_fast_variance=False, rngs=rngs),
        (normal(5, 8),),
        "epsilon",
        "0.001",
    ),
    layers(
        "GroupNorm groups",
        lambda: nn.GroupNorm(2, 8),
        lambda rngs: nnx.GroupNorm(8, num_groups=4, epsilon=1e-5, use_fast_variance=False, rngs=rngs),
        (normal(3, 8),),
        "number of groups",
        "set num_groups=2",
    ),
    functions(
        "epsilon of a norm by hand",
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
        lambda x: x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6),
        (near_zero(X),),
        "epsilon",
        "set epsilon=1e-05",
    ),
    functions("standard deviation", lambda x: x.std(-1), lambda x: x.std(-1), (X,), "variance", "ddof=1"),
    functions("variance", lambda x: x.var(-1, correction=0), lambda x: x.var(-1, ddof=1), (X,), "variance", "ddof=0"),
    functions(
        "LayerNorm without mean",
        lambda x: F.layer_norm(x, (8,)),
        lambda x: x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5),
        (X,),
        "variance",
        "the mean is not subtracted",
    ),
    Planted(
        "batch statistics",
        lambda: held(nn.BatchNorm1d(8), BatchStatistics(nnx.Rngs(0)), "batch", rename={"core": "core.norm"}),
        (normal(5, 8),),
        "train mode",
        "call .eval()",
        "core",
        (("rename", {"core": "core.norm"}),),
    ),
    spoiled(
        "statistics not loaded",
        lambda: nn.BatchNorm1d(8),
        lambda rngs: nnx.BatchNorm(8, epsilon=1e-5, momentum=0.9, use_fast_variance=False, rngs=rngs),
        lambda core: (core.mean.set_value(jnp.zeros(8)), core.var.set_value(jnp.ones(8))),
        (normal(5, 8),),
        "weights",
        "initial value",
    ),
    Planted(
        "scale as an offset",
        lambda: held(nn.RMSNorm(8, eps=1e-6), OneMore(), "gemma", rename={"core.weight": "core.weight"}),
        (X,),
        "scale",
        "1 + core.weight",
    ),
]


class BatchStatistics(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(8, epsilon=1e-5, momentum=0.9, use_fast_variance=False, rngs=rngs)

    def __call__(self, x):
        return self.norm(x, use_running_average=False)


class OneMore(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.zeros(8))

    def __call__(self, x):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + self.weight[...])


# ---------------------------------------------------------------- activations

ACTIVATIONS = [
    Planted("tanh gelu", lambda: block("tanh gelu"), (normal(3, 4, 8),), "activation", "computes tanh gelu", "act"),
    functions("quick gelu", F.gelu, lambda x: x * jax.nn.sigmoid(1.702 * x), (X,), "activation", "computes quick gelu"),
    functions(
        "exact gelu",
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: jax.nn.gelu(x, approximate=False),
        (X,),
        "activation",
        "computes gelu",
    ),
    functions("relu for gelu", F.gelu, jax.nn.relu, (X,), "activation", "computes relu"),
    functions("silu for relu", F.relu, jax.nn.silu, (X,), "activation", "computes silu"),
    functions("no activation", lambda x: torch.tanh(x) * 2, lambda x: x * 2, (X,), "activation", "leaves the function out"),
    functions("slope", lambda x: F.leaky_relu(x, 0.2), jax.nn.leaky_relu, (X,), "activation", "set negative_slope=0.2"),
    functions("odd slope", F.leaky_relu, lambda x: jax.nn.leaky_relu(x, 0.07), (X,), "activation", "slope is 0.07"),
    functions("relu6 for relu", lambda x: F.relu(x * 9), lambda x: jax.nn.relu6(x * 9), (X,), "activation", "computes relu6"),
]

# ---------------------------------------------------------------- attention


def torch_attend(q, k, v, mask=None, fill=float("-inf")):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores if mask is None else scores.masked_fill(mask, fill)
    return torch.softmax(scores, -1) @ v


def attending(change: Callable[..., Any] = lambda scores: scores, mask: Any = lambda m: m, fill: float = -jnp.inf) -> Any:
    def attend(q, k, v, m=None):
        scores = change(q @ k.swapaxes(-2, -1) / math.sqrt(q.shape[-1]))
        return jax.nn.softmax(scores if m is None else jnp.where(mask(m), fill, scores), -1) @ v

    return attend


def masked(name: str, hidden: np.ndarray, cause: str, says: str, **wrong: Any) -> Planted:
    return functions(name, torch_attend, attending(**wrong), (*SEQUENCES, hidden), cause, says)


KEYS = tuple(normal(3, 2, length, 4, name=("cross", length)) for length in (3, 5, 5))


def torch_causal(q, k, v):
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1 + k.shape[-2] - q.shape[-2])
    return torch_attend(q, k, v, hidden)


def flax_causal(q, k, v):
    return attending()(q, k, v, jnp.triu(jnp.ones((q.shape[-2], k.shape[-2]), bool), 1))


SOME = np.zeros((3, 1, 1, 5), bool)
SOME[0, ..., 3:] = SOME[1, ..., 1] = SOME[2, ..., 0] = True
ONE_HIDDEN = np.where(np.arange(3)[:, None, None, None] == 1, np.ones((5, 5), bool), CAUSAL)
SQUARE = tuple(normal(5, 2, 5, 4, name=("square", name)) for name in "qkv")
LENGTHS = (np.arange(5) >= np.array([[5], [4], [2], [1], [3]]))[:, None, None, :]

ATTENTION = [
    Planted("scale of the width", lambda: attention("scale"), attention_inputs(), "softmax scale", "1/sqrt(2) times"),
    functions("no scale", torch_attend, attending(lambda s: s * 2), SEQUENCES, "softmax scale", "sqrt(4) times"),
    functions("scale twice", torch_attend, attending(lambda s: s / 2), SEQUENCES, "softmax scale", "1/sqrt(4) times"),
    functions("odd scale", torch_attend, attending(lambda s: s * 1.0001), SEQUENCES, "softmax scale", "1.0001 times"),
    masked("mask inverted", SOME, "mask", "inverted", mask=lambda m: ~m),
    masked("mask shifted", SOME, "mask", "shifted by one key", mask=lambda m: jnp.roll(m, 1, -1)),
    masked("mask transposed", CAUSAL | np.eye(5, k=-2, dtype=bool), "mask", "queries and keys exchanged", mask=lambda m: m.T),
    masked("mask left out", SOME, "mask", "not used", mask=lambda m: m & False),
    functions("causal at the top left", torch_causal, flax_causal, KEYS, "mask", "top left"),
    functions(
        "mask added as numbers",
        torch_attend,
        lambda q, k, v, m: attending(lambda s: s + m.astype(s.dtype))(q, k, v),
        (*SEQUENCES, SOME),
        "mask",
        "added to the scores as numbers",
    ),
    functions(
        "lengths as queries",
        torch_attend,
        lambda q, k, v, m: attending()(q, k, v, m[:, 0, 0, :]),
        (*SQUARE, LENGTHS),
        "mask",
        "read as (queries, keys)",
    ),
    functions(
        "two masks summed",
        lambda q, k, v, a, b: torch_attend(q, k, v, a | b),
        lambda q, k, v, a, b: attending()(q, k, v, a ^ b),
        (
            *SEQUENCES,
            np.broadcast_to(SOME, (3, 1, 5, 5)).copy(),
            np.broadcast_to(np.eye(5, k=3, dtype=bool), (3, 1, 5, 5)).copy(),
        ),
        "mask",
        "joins two masks by xor",
    ),
    functions(
        "a switch that torch adds",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        attending(mask=lambda m: m == 0),
        (*SEQUENCES, np.array(~SOME, np.float32)),
        "mask",
        "1 shows; torch adds",
    ),
    functions(
        "a constant that is too weak",
        lambda s, m: torch.softmax(s.masked_fill(m, -1e9), -1),
        lambda s, m: jax.nn.softmax(jnp.where(m, s - 1e4, s), -1),
        (normal(3, 2, 5, 5) + 12_000 * np.eye(5, dtype=np.float32)[2], CAUSAL[None, None]),
        "mask",
        "-10000 is added to hidden scores",
    ),
    functions(
        "batch for length",
        lambda x: torch.softmax(x @ x.transpose(-2, -1), -1) @ x,
        lambda x: attending(lambda s: s * 8**0.5)(*[x.swapaxes(0, 1)] * 3).swapaxes(0, 1),
        (X,),
        "axes of arguments",
        "axes 0 and 1",
    ),
    masked("NaN for an average", ONE_HIDDEN, "mask", "fill with -inf", fill=-1e9),
    Planted("average for NaN", lambda: attention("nan"), attention_inputs(), "mask", "fill with -1e+20"),
    functions(
        "zeros for NaN",
        torch_attend,
        lambda q, k, v, m: jnp.where(m.all(-1, keepdims=True), 0, attending(fill=-1e30)(q, k, v, m)),
        (*SEQUENCES, ONE_HIDDEN),
        "fully hidden rows",
        "gets zeros",
    ),
    Planted("merged", lambda: attention("merged by reshape"), attention_inputs(), "order of heads", "then reshape", ""),
    Planted("split", lambda: attention("split by reshape"), attention_inputs(), "order of heads", "then reshape", ""),
    Planted("keys for values", lambda: attention("key and value swapped"), attention_inputs(), "arguments exchanged", "", ""),
    Planted("mask by one", lambda: attention("mask off by one"), attention_inputs(), "mask", "shifted"),
    functions(
        "heads inside",
        lambda x: x.reshape(3, 4, 2, 4).transpose(1, 2).softmax(-2),
        lambda x: jax.nn.softmax(x.reshape(3, 4, 4, 2).swapaxes(2, 3).swapaxes(1, 2), -2),
        (X,),
        "order of heads",
        "in the order (width, heads)",
    ),
    functions(
        "softmax over queries",
        lambda q, k: torch.softmax(q @ k.transpose(-2, -1), -1),
        lambda q, k: jax.nn.softmax(q @ k.swapaxes(-2, -1), -2),
        SEQUENCES[:2],
        "axis",
        "runs over axis 2 in Flax and 3 in torch",
    ),
    functions(
        "keys and queries exchanged",
        torch_attend,
        lambda q, k, v: attending()(k, q, v),
        SEQUENCES,
        "arguments exchanged",
        "args[0] is taken for args[1]",
    ),
    functions(
        "gate for value",
        lambda x: x.chunk(2, -1)[0] * F.silu(x.chunk(2, -1)[1]),
        lambda x: jnp.split(x, 2, -1)[1] * jax.nn.silu(jnp.split(x, 2, -1)[0]),
        (X,),
        "order of pieces",
    ),
]

# ---------------------------------------------------------------- weights and layers


class TorchMatrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class FlaxMatrix(nnx.Module):
    def __init__(self, function: Callable[..., Any]):
        self.weight, self.bias, self.function = nnx.Param(jnp.zeros((8, 8))), nnx.Param(jnp.zeros(8)), function

    def __call__(self, x):
        return self.function(x, self.weight[...], self.bias[...])


def matrix(name: str, function: Any, cause: str, says: str) -> Planted:
    return Planted(name, lambda: held(TorchMatrix(), FlaxMatrix(function), name), (X,), cause, says)


def linear(planted: str, change: Any, cause: str, says: str, shape: tuple[int, int] = (8, 8)) -> Planted:
    """Two Linear layers; the numbers of Flax's are changed."""
    return spoiled(
        planted,
        lambda: nn.Linear(*shape),
        lambda rngs: nnx.Linear(*shape, rngs=rngs),
        lambda core: [leaf.set_value(jnp.asarray(change(np.array(leaf[...])))) for leaf in (core.kernel, core.bias)],
        (X,),
        cause,
        says,
    )


def to_half(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float16).astype(np.float32)


class TorchLSTM(nn.LSTMCell):
    pass


class FlaxLSTM(nnx.Module):
    """The cell by hand, with torch's names, that takes the gates in an order of its own."""

    def __init__(self, order: str = "ifgo", forget: float = 0.0):
        shapes = dict(weight_ih=(24, 4), weight_hh=(24, 6), bias_ih=(24,), bias_hh=(24,))
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.zeros(shape)))
        self.order, self.forget = order, forget

    def __call__(self, x, state):
        h, c = state
        z = x @ self.weight_ih[...].T + h @ self.weight_hh[...].T + self.bias_ih[...] + self.bias_hh[...]
        g = dict(zip(self.order, jnp.split(z, 4, -1), strict=True))
        c = jax.nn.sigmoid(g["f"] + self.forget) * c + jax.nn.sigmoid(g["i"]) * jnp.tanh(g["g"])
        return jax.nn.sigmoid(g["o"]) * jnp.tanh(c), c


STATE = (normal(3, 4), (normal(3, 6), normal(3, 6, name=1)))


class TorchFused(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.in_proj = 2, nn.Parameter(torch.zeros(24, 8))

    def forward(self, x):
        q, k, v = (x @ self.in_proj.T).chunk(3, -1)
        return q, k, v


class FlaxFused(nnx.Module):
    def __init__(self):
        self.in_proj = nnx.Param(jnp.zeros((24, 8)))

    def __call__(self, x):
        y = (x @ self.in_proj[...].T).reshape(3, 4, 2, 3, 4)
        return tuple(y[..., i, :].reshape(3, 4, 8) for i in range(3))


WEIGHTS = [
    matrix("transposed in code", lambda x, w, b: x @ w + b, "kernel layout", "the transpose of core.weight"),
    matrix("bias forgotten", lambda x, w, b: x @ w.T, "bias", "core.bias is not added"),
    matrix("bias twice", lambda x, w, b: x @ w.T + 2 * b, "bias", "core.bias is added twice"),
    linear("square kernel transposed", lambda a: a.T, "weights", "transposed once too often"),
    linear("kernel reshaped", lambda a: a.T.reshape(a.shape), "weights", "reshaped where it must be transposed", (8, 5)),
    linear(
        "not loaded",
        lambda a: np.zeros_like(a) if a.ndim == 1 else random("fresh").standard_normal(a.shape).astype(a.dtype),
        "weights",
        "not loaded",
    ),
    linear("rounded", to_half, "weights", "rounded to float16"),
    linear(
        "one value",
        lambda a: np.where(np.arange(a.size).reshape(a.shape) == 3, 9, a),
        "weights",
        "1 of 64 values of Flax's differ",
    ),
    spoiled(
        "convolution kernel exchanged",
        lambda: nn.Conv2d(3, 3, 3),
        lambda rngs: nnx.Conv(3, 3, (3, 3), padding="VALID", rngs=rngs),
        lambda core: core.kernel.set_value(core.kernel[...].swapaxes(0, 1)),
        (IMAGE,),
        "weights",
        "axes exchanged",
    ),
    spoiled(
        "transposed convolution not turned round",
        lambda: nn.ConvTranspose2d(3, 3, 3, padding=1),
        lambda rngs: nnx.ConvTranspose(3, 3, (3, 3), padding=((1, 1), (1, 1)), transpose_kernel=False, rngs=rngs),
        lambda core: core.kernel.set_value(core.kernel[...][::-1, ::-1]),
        (IMAGE,),
        "weights",
        "turned round in space",
    ),
    Planted("gates in another order", lambda: held(TorchLSTM(4, 6), FlaxLSTM("igfo"), "gates"), STATE, "gates", "(i, f, g, o)"),
    Planted(
        "forget bias",
        lambda: held(TorchLSTM(4, 6), FlaxLSTM(forget=1.0), "forget"),
        STATE,
        "gates",
        "adds 1 to the forget gate",
    ),
    Planted("cut per head", lambda: held(TorchFused(), FlaxFused(), "fused"), (X,), "fused projection", "per head"),
    Planted(
        "weight norm ignored",
        lambda: held(
            parametrizations.weight_norm(nn.Linear(8, 8)),
            FlaxMatrix(lambda x, w, b: x @ w.T + b),
            "norm",
            rename={"core.parametrizations.weight.original1": "core.weight"},
            ignore=("*original0",),
        ),
        (X,),
        "weight norm",
        "weight norm is ignored",
        "core",
        (("rename", {"core.parametrizations.weight.original1": "core.weight"}), ("ignore", ("*original0",))),
    ),
]

# ---------------------------------------------------------------- convolution, pooling, resizing


def flax_pool(x, count_include_pad):
    y = nnx.avg_pool(x.transpose(0, 2, 3, 1), (3, 3), (2, 2), ((1, 1), (1, 1)), count_include_pad=count_include_pad)
    return y.transpose(0, 3, 1, 2)


CONVOLUTIONS = [
    layers(
        "SAME padding with a stride",
        lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1),
        lambda rngs: nnx.Conv(3, 4, (3, 3), strides=2, padding="SAME", rngs=rngs),
        (IMAGE,),
        "convolution",
        "set padding=((1, 1), (1, 1))",
    ),
    layers(
        "circular padding",
        lambda: nn.Conv2d(3, 4, 3, padding=1),
        lambda rngs: nnx.Conv(3, 4, (3, 3), padding="CIRCULAR", rngs=rngs),
        (IMAGE,),
        "convolution",
        "pads by circular",
    ),
    functions(
        "padded zeros",
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        lambda x: flax_pool(x, False),
        (IMAGE,),
        "pooling",
        "count_include_pad=True",
    ),
    functions(
        "corners",
        lambda x: F.interpolate(x, size=(9, 9), mode="bilinear", align_corners=True),
        lambda x: jax.image.resize(x, (2, 3, 9, 9), "bilinear", antialias=False),
        (IMAGE,),
        "resizing",
        "align_corners=True",
    ),
    functions(
        "flatten",
        lambda x: torch.flatten(x, 1) * 2,
        lambda x: x.transpose(0, 2, 3, 1).reshape(2, -1) * 2,
        (FEATURES,),
        "flatten order",
        "channels last",
    ),
]

# ---------------------------------------------------------------- what stands between modules


class TorchPreNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x, memory):
        return x + self.up(self.norm(x)) + memory


class FlaxPreNorm(nnx.Module):
    def __init__(self, fault: str, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(8, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.up, self.fault = nnx.Linear(8, 8, rngs=rngs), fault

    def __call__(self, x, memory):
        y = self.norm(x)
        given = {"norm": x, "memory": memory, "scale": y * 8**0.5}.get(self.fault, y)
        left = {"forgotten": 0, "doubled": 2 * x}.get(self.fault, x)
        return left + self.up(given) + memory


def between(fault: str, cause: str, says: str) -> Planted:
    return Planted(fault, lambda: held(TorchPreNorm(), FlaxPreNorm(fault, nnx.Rngs(0)), "pre"), (X, Y), cause, says)


class TorchLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


class FlaxLast(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(4, 6, rngs=rngs))
        self.out = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.rnn(x)[:, 0])


def torch_rotary(x, angle):
    a, b = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()


def flax_rotary(x, angle):
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    turned = jnp.stack([-pairs[..., 1], pairs[..., 0]], -1).reshape(x.shape)
    half = angle[..., : angle.shape[-1] // 2]
    spread = jnp.repeat(half, 2, -1)
    return x * jnp.cos(spread) + turned * jnp.sin(spread)


ANGLE = np.tile(normal(1, 4, 4, name="angle"), 2)

WIRING = [
    Planted(
        "first step",
        lambda: held(TorchLast(), FlaxLast(nnx.Rngs(0)), "last"),
        (normal(3, 5, 4),),
        "part of a value",
        "position 0 along axis 1 of what core.rnn returns at [0]; take the last position there",
    ),
    between("norm", "norm placement", "taken before core.norm"),
    between("memory", "another value", "its own args[1]"),
    between("scale", "factor", "sqrt(8) times torch's"),
    between("forgotten", "residual", "a residual is not added"),
    between("doubled", "residual", "once too often"),
    functions("embedding scale", lambda x: torch.sin(x) * 64**0.5, jnp.sin, (X,), "factor", "multiply by 8 (sqrt(64))"),
    functions(
        "one term", lambda x, y: (x.sin() + y.cos()).exp(), lambda x, y: jnp.exp(jnp.sin(x)), (X, Y), "terms", "not added"
    ),
    functions("rotary", torch_rotary, flax_rotary, (X, ANGLE), "rotary pairs", "neighbouring channels"),
    functions(
        "rotary in attention",
        lambda q, k, a: torch_rotary(q, a) @ torch_rotary(k, a).transpose(-2, -1),
        lambda q, k, a: flax_rotary(q, a) @ flax_rotary(k, a).swapaxes(-2, -1),
        (X, Y, ANGLE),
        "rotary pairs",
        "neighbouring channels",
    ),
    functions(
        "axes exchanged",
        lambda x: x.sin(),
        lambda x: jnp.sin(x).swapaxes(1, 2),
        (normal(3, 4, 4),),
        "order of axes",
        "(0, 2, 1)",
    ),
    Planted("bfloat16 values", lambda: attention("bf16"), attention_inputs(), "precision", "bfloat16"),
    functions(
        "float16 softmax",
        lambda x: x.softmax(-1).exp(),
        lambda x: jnp.exp(jax.nn.softmax(x.astype(jnp.float16), -1).astype(x.dtype)),
        (X,),
        "size of rounding",
        "float16",
    ),
    Planted(
        "dropout left on", lambda: held(nn.Dropout(0.5), LeftOn(), "dropout"), (X,), "dropout left on", "deterministic=True"
    ),
]


class LeftOn(nnx.Module):
    def __init__(self):
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dropout(x, deterministic=False)


PLANTED = [*NORMS, *ACTIVATIONS, *ATTENTION, *WEIGHTS, *CONVOLUTIONS, *WIRING]
