"""Faults of ports of image models, recurrent nets and whole models, NNX and Linen, and the names that they must not get."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from evidence_pairs import draw, normal
from fault_pairs import FlaxHolder, Planted, TorchHolder, functions, held, layers
from flax import linen, nnx
from torch import nn

import parity

X, Y = normal(3, 4, 8), normal(3, 4, 8, name="y")
IMAGE, SQUARE = normal(2, 4, 6, 5, name="image"), normal(2, 4, 5, 5, name="square")
STEPS = normal(3, 5, 6, name="steps")


def last(x: Any) -> Any:
    return x.transpose(0, 2, 3, 1)


def first(x: Any) -> Any:
    return x.transpose(0, 3, 1, 2)


def flat_image(wrong: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of an image with its channels last."""
    return lambda x: first(wrong(last(x)))


# ---------------------------------------------------------------- convolutions


def convolution(name: str, torch_options: Any, flax_options: Any, cause: str = "convolution", says: str = "") -> Planted:
    """The same kernel slid otherwise."""
    size = torch_options.pop("size", 3)
    make = nn.ConvTranspose2d if "output_padding" in torch_options else nn.Conv2d
    flax = nnx.ConvTranspose if make is nn.ConvTranspose2d else nnx.Conv
    return layers(
        name,
        lambda: make(4, 4, size, **torch_options),
        lambda rngs: flax(4, 4, (size, size), rngs=rngs, **flax_options),
        (IMAGE,),
        cause,
        says,
    )


class DealtOut(nnx.Conv):
    def __call__(self, x):
        return super().__call__(jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1))


CONVOLUTIONS = [
    convolution(
        "transposed, padded as SAME",
        {"stride": 2, "padding": 1, "output_padding": 1},
        {"strides": (2, 2), "padding": "SAME"},
        says="the output is moved by (-1, -1)",
    ),
    convolution(
        "transposed, of another size",
        {"stride": 2, "padding": 1, "output_padding": 0},
        {"strides": (2, 2), "padding": "SAME"},
        says="of size (12, 10) for (11, 9)",
    ),
    convolution(
        "circular padding",
        {"padding": 1, "padding_mode": "circular"},
        {"padding": "SAME"},
        says="Flax pads by zeros where torch pads otherwise",
    ),
    convolution("dilation", {"dilation": 2, "padding": 2}, {"padding": 1}, says="Flax has a dilation of 1, torch of (2, 2)"),
    convolution("stride", {"stride": 2, "padding": 1}, {"padding": 1}, says="set strides=(2, 2)"),
    layers(
        "groups",
        lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2),
        lambda rngs: DealtOut(4, 4, (3, 3), padding=1, feature_group_count=2, rngs=rngs),
        (IMAGE,),
        "convolution",
        "deals the channels that it takes out to the groups one by one",
    ),
    functions(
        "padding before",
        lambda x: F.pad(x, (3, 0)).cumsum(-1),
        lambda x: jnp.cumsum(jnp.pad(x, ((0, 0), (0, 0), (1, 2))), -1),
        (X,),
        "padding",
        "Flax pads by (1, 2), torch by (3, 0)",
    ),
]

# ---------------------------------------------------------------- pooling, resizing, pixels


def windows(x: Any, fill: float, low: int = 1, high: int = 1) -> Any:
    x = jnp.pad(x, ((0, 0), (low, high), (low, high), (0, 0)), constant_values=fill)
    return nnx.max_pool(x, (3, 3), (1, 1), "VALID")


def shape(*size: int) -> tuple[int, ...]:
    return (2, 4, *size)


WINDOWS = [
    functions(
        "zeros around a maximum",
        lambda x: F.max_pool2d(x - 3, 3, 1, 1),
        flat_image(lambda x: windows(x - 3, 0.0)),
        (IMAGE,),
        "pooling",
        "sought among padded zeros",
    ),
    functions(
        "maximum, padded behind",
        lambda x: F.max_pool2d(x, 3, 1, 1),
        flat_image(lambda x: windows(x, -jnp.inf, 0, 2)),
        (IMAGE,),
        "pooling",
        "padded by ((0, 2), (0, 2))",
    ),
    functions(
        "mean for maximum",
        lambda x: F.max_pool2d(x, 2),
        flat_image(lambda x: nnx.avg_pool(x, (2, 2), (2, 2))),
        (IMAGE,),
        "pooling",
        "Flax takes the mean of a window, torch the largest",
    ),
    functions(
        "smoothed",
        lambda x: F.interpolate(x, size=(3, 3), mode="bilinear"),
        lambda x: jax.image.resize(x, shape(3, 3), "bilinear"),
        (IMAGE,),
        "resizing",
        "antialias=False",
    ),
    functions(
        "cubic",
        lambda x: F.interpolate(x, size=(9, 8), mode="bicubic"),
        lambda x: jax.image.resize(x, shape(9, 8), "cubic"),
        (IMAGE,),
        "resizing",
        "a = -0.5",
    ),
    functions(
        "nearest for bilinear",
        lambda x: F.interpolate(x, size=(9, 8), mode="bilinear"),
        lambda x: jax.image.resize(x, shape(9, 8), "nearest"),
        (IMAGE,),
        "resizing",
        "Flax resizes by nearest-exact, torch by bilinear",
    ),
    functions(
        "pixels",
        lambda x: F.pixel_shuffle(x, 2).sin(),
        lambda x: jnp.sin(x.reshape(2, 2, 2, 2, 6, 5).transpose(0, 3, 4, 1, 5, 2).reshape(2, 2, 12, 10)),
        (normal(2, 8, 6, 5),),
        "pixel shuffle",
        "(row, column, channel)",
    ),
    layers(
        "number of groups",
        lambda: nn.GroupNorm(2, 4),
        lambda rngs: nnx.GroupNorm(4, 4, epsilon=1e-5, use_fast_variance=False, rngs=rngs),
        (IMAGE,),
        "number of groups",
        "set num_groups=2",
    ),
]

# ---------------------------------------------------------------- functions

HIDDEN = np.triu(np.ones((5, 5), bool), 1)


def torch_hashed(ids: torch.Tensor) -> torch.Tensor:
    return (ids.long() * 1_000_003 % 97).double().sin()


def flax_hashed(ids: jax.Array) -> jax.Array:
    return jnp.sin((ids.astype(jnp.int32) * jnp.int32(1_000_003) % jnp.int32(97)).astype(float))


FUNCTIONS = [
    functions("halves of a gate", F.glu, lambda x: jnp.split(x, 2, -1)[1] * jax.nn.sigmoid(jnp.split(x, 2, -1)[0]), (X,),
              "order of pieces", "taken for the gate"),
    functions("gate of another kind", F.glu, lambda x: jnp.split(x, 2, -1)[0] * jax.nn.silu(jnp.split(x, 2, -1)[1]), (X,),
              "activation", "silu of the gate"),
    functions("put together the other way", lambda x, y: torch.cat([x.sin(), y], -1).cumsum(-1),
              lambda x, y: jnp.cumsum(jnp.concatenate([y, jnp.sin(x)], -1), -1), (X, Y), "order of pieces", "(1, 0)"),
    functions("guard", lambda x: x.relu().clamp(min=0.1).log(), lambda x: jnp.log(jax.nn.relu(x)), (X,), "guard", "jnp.clip"),
    functions("whole numbers", torch_hashed, flax_hashed, (np.arange(5000, 5012, dtype=np.int32).reshape(3, 4),),
              "whole numbers", "computes in int32, torch in int64"),
    functions("length", lambda x: F.normalize(x, dim=-1), lambda x: x / jnp.abs(x).sum(-1, keepdims=True), (X,),
              "reduction", "the sum of absolute values"),
    functions("logarithm of softmax", lambda x: x.log_softmax(-1), lambda x: jax.nn.softmax(x, -1), (X,),
              "reduction", "softmax"),
    functions("another operand", lambda x, y: (x.sin() + y.cos()) @ y.transpose(1, 2),
              lambda x, y: (jnp.sin(x) + jnp.cos(y)) @ x.swapaxes(1, 2), (X, Y), "another value", "its own args[0]"),
    functions("residual in a sum", lambda x, y: (x + y.sin()).exp(), lambda x, y: jnp.exp(jnp.sin(y)), (X, Y),
              "residual", "its own args[0] is not added"),
    functions("weak mask", lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
              lambda q, k: jax.nn.softmax(jnp.where(HIDDEN, -1.0, q @ k.swapaxes(-1, -2) / 2.0), -1) @ k,
              (normal(3, 2, 5, 4), normal(3, 2, 5, 4, name="k")), "mask", "hidden scores are -1"),
    functions("backwards", lambda x: x.cumsum(1).sin(), lambda x: jnp.sin(jnp.cumsum(x[:, ::-1], 1)), (X,),
              "axes of arguments", "axis 1 of its arguments from the end"),
]  # fmt: skip

# ---------------------------------------------------------------- recurrent layers


class FlaxGru(nnx.Module):
    """A GRU by hand, with torch's arrays."""

    def __init__(self, fault: str, rngs: nnx.Rngs):
        shapes = {"weight_ih_l0": (24, 6), "weight_hh_l0": (24, 8), "bias_ih_l0": (24,), "bias_hh_l0": (24,)}
        for name, size in shapes.items():
            setattr(self, name, nnx.Param(jnp.zeros(size)))
        self.fault = fault

    def __call__(self, x):
        def step(h, given):
            a, b = given @ self.weight_ih_l0[...].T + self.bias_ih_l0[...], h @ self.weight_hh_l0[...].T
            (ra, za, na), (rb, zb, nb), (rc, zc, nc) = (jnp.split(y, 3, -1) for y in (a, b, self.bias_hh_l0[...]))
            r, z = jax.nn.sigmoid(ra + rb + rc), jax.nn.sigmoid(za + zb + zc)
            inner = {"outside": r * nb + nc, "before": (r * h) @ self.weight_hh_l0[...][16:].T + nc}.get(
                self.fault, r * (nb + nc)
            )
            n = na + inner if self.fault == "no tanh" else jnp.tanh(na + inner)
            h = z * n + (1 - z) * h if self.fault == "turned" else (1 - z) * n + z * h
            return h, h

        begin = jnp.ones if self.fault == "ones" else jnp.zeros
        return jax.lax.scan(step, begin((x.shape[0], 8), x.dtype), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def recurrent(fault: str, cause: str, says: str) -> Planted:
    def build() -> tuple[Any, Any]:
        theirs, mine = draw(TorchHolder(nn.GRU(6, 8, batch_first=True)), "gru"), FlaxHolder(FlaxGru(fault, nnx.Rngs(0)))
        theirs.forward = lambda x: theirs.core(x)[0]
        mine.eval()
        parity.transfer(theirs, mine)
        return theirs, mine

    return Planted(f"gru {fault}", build, (STEPS,), cause, says)


class BothWays(nnx.Module):
    """Two plain recurrent layers by hand, with torch's arrays."""

    def __init__(self, fault: str):
        for end in ("_l0", "_l0_reverse"):
            for name, size in (("weight_ih", (4, 6)), ("weight_hh", (4, 4)), ("bias_ih", (4,)), ("bias_hh", (4,))):
                setattr(self, name + end, nnx.Param(jnp.zeros(size)))
        self.fault = fault

    def states(self, steps, end):
        w, u, b, c = (getattr(self, name + end)[...] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))

        def step(h, given):
            h = jnp.tanh(given @ w.T + b + h @ u.T + c)
            return h, h

        return jax.lax.scan(step, jnp.zeros((steps.shape[1], 4), steps.dtype), steps)[1]

    def __call__(self, x):
        steps = x.swapaxes(0, 1)
        back = self.states(steps if self.fault == "forwards" else steps[::-1], "_l0_reverse")
        back = back if self.fault else back[::-1]
        return jnp.concatenate([self.states(steps, "_l0"), back], -1).swapaxes(0, 1)


def both_ways(fault: str, says: str) -> Planted:
    def build() -> tuple[Any, Any]:
        theirs = draw(TorchHolder(nn.RNN(6, 4, batch_first=True, bidirectional=True)), "both")
        theirs.forward = lambda x: theirs.core(x)[0]
        mine = FlaxHolder(BothWays(fault))
        mine.eval()
        parity.transfer(theirs, mine)
        return theirs, mine

    return Planted(f"both ways {fault}", build, (STEPS,), "directions", says)


RECURRENT = [
    recurrent("outside", "gates", "does not multiply the second bias"),
    recurrent("before", "gates", "multiplies the old state"),
    recurrent("turned", "gates", "h = (1 - z) * n + z * h"),
    recurrent("no tanh", "activation", "leaves the function out where torch computes tanh"),
    recurrent("ones", "first state", "begin with jnp.zeros"),
    both_ways("forwards", "both directions go through the sequence forwards"),
    both_ways("not turned back", "are not turned back"),
]

# ---------------------------------------------------------------- whole modules


class TorchPair(nn.Module):
    """Two norms, a projection of three pieces, a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.up = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 24)
        self.positions, self.patches = nn.Parameter(torch.randn(1, 12, 8)), nn.Conv2d(4, 8, 2, stride=2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.up(self.norm1(x)).chunk(3, -1))
        y = ((q @ k.transpose(-2, -1)).tanh() @ v).transpose(1, 2).flatten(2)
        return x + self.norm2(y)


class FlaxPair(nnx.Module):
    def __init__(self, fault: str, rngs: nnx.Rngs):
        options = {"epsilon": 1e-5, "use_fast_variance": False, "rngs": rngs}
        self.norm1, self.norm2, self.up = nnx.LayerNorm(8, **options), nnx.LayerNorm(8, **options), nnx.Linear(8, 24, rngs=rngs)
        self.positions, self.patches = nnx.Param(jnp.zeros((1, 12, 8))), nnx.Conv(4, 8, (2, 2), strides=2, padding=0, rngs=rngs)
        self.fault = fault

    def __call__(self, image):
        on, x = self.fault, self.patches(last(image))
        x = (x.swapaxes(1, 2) if on == "columns" else x).reshape(x.shape[0], -1, 8)
        positions = self.positions[...]
        positions = positions.at[:, 0].set(0) if on == "one position" else positions
        positions = jnp.roll(positions, 1, 1) if on == "moved" else positions
        x = x + (8**0.5 * positions if on == "scaled" else positions)
        y = self.up(self.norm2(x) if on == "other norm" else self.norm1(x))
        pieces = y.reshape(*y.shape[:2], 2, 3, 4).swapaxes(2, 3) if on == "per head" else y.reshape(*y.shape[:2], 3, 2, 4)
        q, k, v = pieces.transpose(2, 0, 3, 1, 4)
        y = (jnp.tanh(q @ k.swapaxes(-2, -1)) @ v).swapaxes(1, 2).reshape(x.shape)
        y = self.norm2(self.norm2(y)) if on == "twice" else self.norm2(y)
        return x + y


def whole(fault: str, cause: str, says: str) -> Planted:
    return Planted(fault, lambda: held(TorchPair(), FlaxPair(fault, nnx.Rngs(0)), "whole"), (normal(2, 4, 6, 8),), cause, says)


WHOLE = [
    whole("columns", "flatten order", "column by column"),
    whole("one position", "terms", "lacks core.positions at position 0 along axis 1"),
    whole("moved", "terms", "core.positions added moved by 1 along axis 1"),
    whole("scaled", "factor", "sqrt(8) times core.positions added"),
    whole("other norm", "another layer", "core.norm2 is called where torch calls core.norm1"),
    whole("twice", "another layer", "core.norm2 is called once more"),
    whole("per head", "fused projection", "(heads, pieces, width)"),
]

# ---------------------------------------------------------------- Linen


class LinenHolder(linen.Module):
    core: linen.Module

    def __call__(self, x):
        return first(self.core(last(x))) if x.ndim == 4 else self.core(x)


def in_linen(name: str, right: Any, wrong: Callable[[], linen.Module], inputs: Any, cause: str, says: str) -> Planted:
    """A layer of Linen's under the path `core`."""

    def build() -> tuple[Any, Any]:
        theirs, mine = draw(TorchHolder(right()), name), parity.Linen(LinenHolder(wrong()), None, *inputs)
        return theirs, parity.transfer(theirs, mine).value if theirs.state_dict() else mine

    return Planted(f"linen {name}", build, inputs, cause, says)


class LinenFunction(linen.Module):
    function: Callable[..., Any]

    def __call__(self, x):
        return self.function(x)


LINEN = [
    in_linen("bfloat16 layer", lambda: nn.Linear(8, 6), lambda: linen.Dense(6, dtype=jnp.bfloat16), (X,),
             "precision", "dtype=bfloat16"),
    in_linen("dilation", lambda: nn.Conv2d(4, 4, 3, dilation=2, padding=2), lambda: linen.Conv(4, (3, 3), padding=1), (IMAGE,),
             "convolution", "dilation of 1"),
    in_linen("number of groups", lambda: nn.GroupNorm(2, 4), lambda: linen.GroupNorm(4, epsilon=1e-5, use_fast_variance=False),
             (IMAGE,), "number of groups", "set num_groups=2"),
    in_linen("smoothed", lambda: nn.Upsample((3, 3), mode="bilinear"),
             lambda: LinenFunction(lambda x: jax.image.resize(x, (2, 3, 3, 4), "bilinear")), (IMAGE,),
             "resizing", "antialias=False"),
    in_linen("mean for maximum", lambda: nn.MaxPool2d(2), lambda: LinenFunction(lambda x: linen.avg_pool(x, (2, 2), (2, 2))),
             (IMAGE,), "pooling", "Flax takes the mean of a window"),
]  # fmt: skip

PORTS = [*CONVOLUTIONS, *WINDOWS, *FUNCTIONS, *RECURRENT, *WHOLE, *LINEN]


# ---------------------------------------------------------------- neighbours

# The names that a fault must not get beside its own, by the name of the pair.
NEVER = {
    "transposed, padded as SAME": ("padding", "order of axes"),
    "dilation": ("padding", "pooling"),
    "groups": ("order of pieces", "kernel layout"),
    "padding before": ("convolution", "axes of arguments"),
    "zeros around a maximum": ("padding", "guard"),
    "mean for maximum": ("resizing", "reduction"),
    "nearest for bilinear": ("pooling",),
    "number of groups": ("variance", "epsilon"),
    "halves of a gate": ("activation", "axes of arguments"),
    "gate of another kind": ("order of pieces",),
    "put together the other way": ("arguments exchanged", "padding"),
    "length": ("axis", "guard"),
    "another operand": ("arguments exchanged", "residual"),
    "residual in a sum": ("guard", "another layer"),
    "backwards": ("order of axes", "reduction"),
    "gru outside": ("first state", "bias", "activation"),
    "gru before": ("first state", "bias"),
    "gru turned": ("activation",),
    "gru no tanh": ("gates",),
    "gru ones": ("gates", "bias"),
    "both ways forwards": ("gates",),
    "columns": ("order of heads",),
    "moved": ("factor", "another layer"),
    "scaled": ("terms",),
    "other norm": ("fused projection", "norm placement"),
    "per head": ("another layer", "order of pieces"),
    "linen bfloat16 layer": ("kernel layout", "bias"),
    "linen dilation": ("precision", "pooling"),
    "linen number of groups": ("variance", "precision"),
    "linen mean for maximum": ("resizing",),
}

# Faults beside those above in the same layers, and the name that they must not get.
STRANGERS = [
    (
        layers(
            "epsilon of groups",
            lambda: nn.GroupNorm(2, 4),
            lambda rngs: nnx.GroupNorm(4, 2, epsilon=1e-2, use_fast_variance=False, rngs=rngs),
            (IMAGE,),
            "epsilon",
        ),
        "number of groups",
    ),
    (
        functions(
            "another logarithm",
            lambda x: x.relu().clamp(min=0.1).log(),
            lambda x: jnp.log2(jnp.clip(jax.nn.relu(x), 0.1)),
            (X,),
            "factor",
        ),
        "guard",
    ),
    (
        functions(
            "pooled twice as far",
            lambda x: F.max_pool2d(x, 3, 1, 1),
            flat_image(lambda x: windows(x, -jnp.inf, 2, 0)),
            (IMAGE,),
            "pooling",
        ),
        "padding",
    ),
    (
        functions(
            "length over another axis",
            lambda x: F.normalize(x, dim=-1),
            lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True),
            (X,),
            "axis",
        ),
        "reduction",
    ),
    (
        in_linen("epsilon of groups", lambda: nn.GroupNorm(2, 4),
                 lambda: linen.GroupNorm(2, epsilon=1e-2, use_fast_variance=False), (IMAGE,), "epsilon", ""),
        "number of groups",
    ),
]  # fmt: skip

# What is tried in every run; the rest stands in the slow one.
QUICK = ("transposed, padded as SAME", "circular padding", "groups", "zeros around a maximum", "cubic", "halves of a gate")
QUICK += ("whole numbers", "weak mask", "gru before", "both ways not turned back", "other norm", "per head", "moved")
QUICK += ("linen bfloat16 layer", "linen dilation")
