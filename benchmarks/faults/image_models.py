"""Pairs over images and signals: residual and U-shaped convolutional nets, a vision Transformer, a convolution over time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from benchmarks.faults import twins
from benchmarks.faults.layers import MLP, Attention, Function, activation, layer_norm
from benchmarks.faults.planting import Model, Plan, swap

CHANNELS, CLASSES = 6, 5


def images(rng: np.random.Generator) -> tuple[np.ndarray]:
    """`(2, 3, 8, 10)`, channels first as torch has them."""
    return (rng.normal(0.3, 1.0, (2, 3, 8, 10)).astype(np.float32),)


class ChannelsLast(nnx.Module):
    """What every port of an image model begins with."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """`(n, c, h, w)` to `(n, h, w, c)`."""
        return x.transpose(0, 2, 3, 1)


def batch_norm(plan: Plan, place: str, channels: int, rngs: nnx.Rngs) -> nnx.BatchNorm:
    """Flax's own layer; its momentum is one minus torch's."""
    return nnx.BatchNorm(
        channels,
        epsilon=1e-3 if plan(place, "epsilon") else 1e-5,
        momentum=0.1 if plan(place, "momentum not turned round") else 0.9,
        use_fast_variance=False,
        rngs=rngs,
    )


# ---------------------------------------------------------------- a residual net with batch norm


class TorchBlock(nn.Module):
    """Two convolutions, batch norm, a strided shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(CHANNELS, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8)
        self.shortcut, self.relu = nn.Conv2d(CHANNELS, 8, 1, stride=2), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))


class TorchResNet(nn.Module):
    """A stem, a pool, a block, a flat head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(3, stride=1, padding=1)
        self.block, self.average = TorchBlock(), nn.AvgPool2d(2, stride=1, padding=1)
        self.head = nn.Linear(8 * 5 * 6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = self.pool(self.bn(self.relu(self.stem(x))))
        return self.head(torch.flatten(self.average(self.block(x)), 1))


class Block(nnx.Module):
    """The port of the block."""

    def __init__(self, plan: Plan, rngs: nnx.Rngs):
        same = plan("conv1", "SAME padding at stride 2")
        self.conv1 = nnx.Conv(CHANNELS, 8, (3, 3), strides=2, padding="SAME" if same else 1, rngs=rngs)
        self.bn1 = batch_norm(plan, "bn1", 8, rngs)
        self.conv2 = nnx.Conv(8, 8, (3, 3), padding=1, feature_group_count=2, rngs=rngs)
        self.bn2 = batch_norm(plan, "bn2", 8, rngs)
        self.shortcut = nnx.Conv(CHANNELS, 8, (1, 1), strides=2, padding=0, rngs=rngs)
        self.relu = Function(activation(plan, "relu", "relu"))
        self.early, self.no_shortcut = plan("", "activation before the sum"), plan("", "shortcut left out")
        self.order = plan("", "activation before the normalisation")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the block."""
        y = self.conv1(x)
        y = self.bn1(self.relu(y)) if self.order else self.relu(self.bn1(y))
        y = self.bn2(self.conv2(y))
        if self.no_shortcut:
            return self.relu(y)
        return self.relu(y) + self.shortcut(x) if self.early else self.relu(y + self.shortcut(x))


class ResNet(nnx.Module):
    """The port."""

    def __init__(self, plan: Plan):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(3, CHANNELS, (3, 3), padding=1, use_bias=False, rngs=rngs)
        self.bn = batch_norm(plan, "bn", CHANNELS, rngs)
        self.relu = Function(jax.nn.relu)
        padded = plan("pool", "padded with zeros")
        self.pool = Function(lambda x: max_pool(x, 0.0 if padded else -jnp.inf))
        self.block = Block(plan.under("block"), rngs)
        count = not plan("average", "padding not counted")
        self.average = Function(lambda x: nnx.avg_pool(x, (2, 2), (1, 1), [(1, 1), (1, 1)], count_include_pad=count))
        self.head = nnx.Linear(8 * 5 * 6, CLASSES, rngs=rngs)
        self.as_it_lies = plan("", "flattened channels last")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Scores of the classes."""
        x = self.pool(self.bn(self.relu(self.stem(x.transpose(0, 2, 3, 1)))))
        x = self.average(self.block(x))
        x = x if self.as_it_lies else x.transpose(0, 3, 1, 2)
        return self.head(x.reshape(x.shape[0], -1))


def max_pool(x: jax.Array, fill: float) -> jax.Array:
    """The largest of nine neighbours, with a border of `fill`."""
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=fill)
    return nnx.max_pool(x, (3, 3), (1, 1), "VALID")


def resnet_weights(model: Any, plan: Plan) -> None:
    """What goes wrong with convolutions and statistics on their way."""
    if plan("stem", "kernel axes permuted"):
        model.stem.kernel[...] = model.stem.kernel[...].swapaxes(0, 1)
    if plan("block.conv2", "kernel flipped"):
        model.block.conv2.kernel[...] = model.block.conv2.kernel[...][::-1, ::-1]
    if plan("block.bn1", "running statistics left at their initial values"):
        model.block.bn1.mean[...], model.block.bn1.var[...] = jnp.zeros(8), jnp.ones(8)
    if plan("block.bn2", "scale and bias swapped"):
        swap(model.block.bn2.scale, model.block.bn2.bias)
    if plan("bn", "standard deviation for variance"):
        model.bn.var[...] = jnp.sqrt(model.bn.var[...])


# ---------------------------------------------------------------- a small U-net: group norm, transposed convolution


class TorchUNet(nn.Module):
    """Down, up, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.act, self.down = nn.SiLU(), nn.Conv2d(8, 8, 2, stride=2)
        self.up = nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1)
        self.leave = nn.Conv2d(16, 3, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        """An image of the same size."""
        x = self.act(self.norm(self.enter(x)))
        return self.leave(torch.cat([x, self.up(self.down(x))], 1))


class UNet(nnx.Module):
    """The port."""

    def __init__(self, plan: Plan):
        rngs = nnx.Rngs(0)
        self.enter = nnx.Conv(3, 8, (3, 3), padding=1, rngs=rngs)
        groups = 2 if plan("norm", "number of groups") else 4
        epsilon = 1e-6 if plan("norm", "epsilon") else 1e-5
        self.norm = nnx.GroupNorm(8, groups, epsilon=epsilon, use_fast_variance=plan("norm", "fast variance"), rngs=rngs)
        self.act = Function(activation(plan, "act", "silu"))
        self.down = nnx.Conv(8, 8, (2, 2), strides=2, padding="VALID", rngs=rngs)
        pads = ((1, 3), (1, 3)) if plan("up", "padding of one side") else 2
        self.up = nnx.ConvTranspose(8, 8, (4, 4), strides=(2, 2), padding=pads, transpose_kernel=False, rngs=rngs)
        self.leave = nnx.Conv(
            16, 3, (3, 3), padding="SAME" if plan("leave", "zeros for circular padding") else "CIRCULAR", rngs=rngs
        )
        self.turned, self.no_skip = (
            plan("", "skip connection behind, not before"),
            plan("", "skip connection from the input's norm"),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """An image of the same size."""
        normed = self.norm(self.enter(x.transpose(0, 2, 3, 1)))
        x = self.act(normed)
        up = self.up(self.down(x))
        x = normed if self.no_skip else x
        return self.leave(jnp.concatenate([up, x] if self.turned else [x, up], -1)).transpose(0, 3, 1, 2)


def unet_weights(model: Any, plan: Plan) -> None:
    """What goes wrong with a transposed convolution."""
    if plan("up", "kernel not flipped"):
        model.up.kernel[...] = model.up.kernel[...][::-1, ::-1]
    if plan("up", "input and output axes exchanged"):
        model.up.kernel[...] = model.up.kernel[...].swapaxes(2, 3)
    if plan("down", "height and width exchanged"):
        model.down.kernel[...] = model.down.kernel[...].swapaxes(0, 1)


# ---------------------------------------------------------------- a vision Transformer


class TorchVit(nn.Module):
    """Patches, a class token, one block, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 2, stride=2)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 24)), nn.Parameter(torch.randn(1, 21, 24))
        self.norm1, self.attention = nn.LayerNorm(24), twins.Attention(24, 4)
        self.norm2, self.mlp = nn.LayerNorm(24), twins.MLP(24, 40, nn.GELU())
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm(x)[:, 0])


class Vit(nnx.Module):
    """The port."""

    def __init__(self, plan: Plan):
        rngs = nnx.Rngs(0)
        self.patches = nnx.Conv(3, 24, (2, 2), strides=2, padding="VALID", rngs=rngs)
        self.token, self.positions = nnx.Param(jnp.zeros((1, 1, 24))), nnx.Param(jnp.zeros((1, 21, 24)))
        self.norm1, self.attention = layer_norm(plan, "norm1", 24, rngs), Attention(plan.under("attention"), 24, 4, rngs)
        self.norm2, self.mlp = layer_norm(plan, "norm2", 24, rngs), MLP(plan.under("mlp"), 24, 40, rngs)
        self.norm, self.head = layer_norm(plan, "norm", 24, rngs), nnx.Linear(24, CLASSES, rngs=rngs)
        self.columns, self.last = plan("", "patches in the order of columns"), plan("", "class token at the end")
        self.mean, self.unplaced = plan("", "mean of all tokens for the first"), plan("", "class token without a position")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Scores of the classes."""
        x = self.patches(x.transpose(0, 2, 3, 1))
        x = (x.swapaxes(1, 2) if self.columns else x).reshape(x.shape[0], -1, 24)
        token = jnp.broadcast_to(self.token[...], (x.shape[0], 1, 24))
        x = jnp.concatenate([x, token] if self.last else [token, x], 1)
        x = x + (self.positions[...].at[:, 0].set(0.0) if self.unplaced else self.positions[...])
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        x = self.norm(x)
        return self.head(x.mean(1) if self.mean else x[:, -1] if self.last else x[:, 0])


# ---------------------------------------------------------------- convolutions over time


def signals(rng: np.random.Generator) -> tuple[np.ndarray]:
    """`(2, 6, 11)`, channels first."""
    return (rng.normal(size=(2, 6, 11)).astype(np.float32),)


class TorchWave(nn.Module):
    """A causal dilated convolution with a gate, a depthwise one, a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.dilated, self.depthwise = nn.Conv1d(6, 16, 3, dilation=2), nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.point, self.head = nn.Conv1d(8, 6, 1), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        y = nn.functional.glu(self.dilated(nn.functional.pad(x, (4, 0))), dim=1)
        x = x + self.point(self.depthwise(y))
        return self.head(x.std(2))


class Wave(nnx.Module):
    """The port."""

    def __init__(self, plan: Plan):
        rngs = nnx.Rngs(0)
        self.ends = (2, 2) if plan("", "centred for causal padding") else (4, 0)
        dilation = 1 if plan("dilated", "dilation left out") else 2
        self.dilated = nnx.Conv(6, 16, (3,), kernel_dilation=dilation, padding="VALID", rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3,), padding=1, feature_group_count=8, rngs=rngs)
        self.point, self.head = nnx.Conv(8, 6, (1,), rngs=rngs), nnx.Linear(6, CLASSES, rngs=rngs)
        self.gate_first, self.ddof = plan("", "gate taken for the value"), 0 if plan("", "deviation over n") else 1
        self.no_residual, self.tanh = plan("", "residual missing"), plan("", "tanh on the value")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Scores of the classes."""
        x = x.swapaxes(1, 2)
        value, gate = jnp.split(self.dilated(jnp.pad(x, ((0, 0), self.ends, (0, 0)))), 2, -1)
        value = value[:, -x.shape[1] :]
        gate = gate[:, -x.shape[1] :]
        value, gate = (gate, value) if self.gate_first else (value, gate)
        y = self.point(self.depthwise((jnp.tanh(value) if self.tanh else value) * jax.nn.sigmoid(gate)))
        x = y if self.no_residual else x + y
        return self.head(x.std(1, ddof=self.ddof))


# ---------------------------------------------------------------- a decoder: groups, weight norm, resizing


def features(rng: np.random.Generator) -> tuple[np.ndarray]:
    """`(2, 8, 6, 5)`, channels first."""
    return (rng.normal(size=(2, 8, 6, 5)).astype(np.float32),)


class TorchDecoder(nn.Module):
    """Groups, the nearest pixel, weight norm, channels made into pixels, a smooth resize, a reflected border."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped, self.near = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.Upsample((11, 9), mode="nearest")
        self.point, self.shuffle = parametrizations.weight_norm(nn.Conv2d(8, 12, 1)), nn.PixelShuffle(2)
        self.smooth = nn.Upsample((9, 13), mode="bilinear", align_corners=False)
        self.leave = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
        self.gamma, self.dropout = nn.Parameter(torch.randn(4, 1, 1)), nn.Dropout2d(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """An image of four channels."""
        x = self.shuffle(self.point(self.near(x + self.grouped(x))))
        return self.dropout(self.leave(self.smooth(x)) * self.gamma)


class WeightNormed(nnx.Module):
    """The port of a pointwise convolution under weight norm, by hand: length and direction apart."""

    def __init__(self, plan: Plan, place: str):
        self.g, self.v = nnx.Param(jnp.zeros((1, 1, 1, 12))), nnx.Param(jnp.zeros((1, 1, 8, 12)))
        self.bias, self.ignored = nnx.Param(jnp.zeros(12)), plan(place, "weight norm ignored")
        self.long = plan(place, "length left out")

    def __call__(self, x: jax.Array) -> jax.Array:
        """`(n, h, w, 8)` to `(n, h, w, 12)`."""
        v = self.v[...]
        unit = v / jnp.sqrt((v * v).sum((0, 1, 2), keepdims=True))
        kernel = v if self.ignored else unit if self.long else self.g[...] * unit
        return x @ kernel[0, 0] + self.bias[...]


class Decoder(nnx.Module):
    """The port."""

    def __init__(self, plan: Plan):
        rngs = nnx.Rngs(0)
        self.grouped = DealtOut(rngs) if plan("grouped", "groups dealt out") else grouped(rngs)
        by_centre, rows_first = plan("near", "nearest by the centres"), plan("shuffle", "pixels in the order of rows first")
        self.near = Function(lambda x: nearest(x, (11, 9), by_centre))
        self.point = WeightNormed(plan, "point")
        self.shuffle = Function(lambda x: pixels(x, rows_first))
        corners, smoothed = plan("smooth", "corners lined up"), plan("smooth", "smoothed before it shrinks")
        nearest_instead = plan("smooth", "nearest for bilinear")
        self.smooth = Function(lambda x: resized(x, (9, 13), corners, smoothed, nearest_instead))
        border = "SAME" if plan("leave", "zeros for reflected border") else "REFLECT"
        self.leave = nnx.Conv(3, 4, (3, 3), padding=border, rngs=rngs)
        self.gamma, self.dropout = nnx.Param(jnp.zeros((4, 1, 1))), nnx.Dropout(0.2, broadcast_dims=(1, 2), rngs=rngs)
        self.unscaled = plan("", "scale of the layer left out")

    def __call__(self, x: jax.Array) -> jax.Array:
        """An image of four channels."""
        x = x.transpose(0, 2, 3, 1)
        x = self.smooth(self.shuffle(self.point(self.near(x + self.grouped(x)))))
        y = self.leave(x)
        y = y if self.unscaled else y * self.gamma[...][:, 0, 0]
        return self.dropout(y).transpose(0, 3, 1, 2)


DECODER_NAMES = {f"point.parametrizations.weight.original{i}": f"point.{name}" for i, name in enumerate("gv")}


def grouped(rngs: nnx.Rngs) -> nnx.Conv:
    """Two groups of neighbouring channels."""
    return nnx.Conv(8, 8, (3, 3), padding=1, feature_group_count=2, rngs=rngs)


class DealtOut(nnx.Conv):
    """A convolution whose channels are dealt out to the two groups one by one."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(8, 8, (3, 3), padding=1, feature_group_count=2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Convolve."""
        return super().__call__(jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1))


def nearest(x: jax.Array, size: tuple[int, int], by_centre: bool) -> jax.Array:
    """The nearest pixel by its lower corner, as torch takes it, or by its centre, as jax does."""
    for axis, new in zip((1, 2), size, strict=True):
        places = (jnp.arange(new) + (0.5 if by_centre else 0)) * x.shape[axis] / new
        x = jnp.take(x, jnp.floor(places).astype(int), axis)
    return x


def pixels(x: jax.Array, turned: bool) -> jax.Array:
    """Channels made into two by two pixels, `(n, h, w, c * 4)` to `(n, 2 * h, 2 * w, c)`."""
    n, h, w, _ = x.shape
    parts = x.reshape(n, h, w, 2, 2, -1) if turned else jnp.moveaxis(x.reshape(n, h, w, -1, 2, 2), 3, 5)
    return parts.transpose(0, 1, 3, 2, 4, 5).reshape(n, 2 * h, 2 * w, -1)


def resized(x: jax.Array, size: tuple[int, int], corners: bool, smoothed: bool, near: bool) -> jax.Array:
    """Bilinear between centres, or between corners."""
    shape = (x.shape[0], *size, x.shape[3])
    if not corners:
        return jax.image.resize(x, shape, "nearest" if near else "bilinear", antialias=smoothed)
    for axis, new in zip((1, 2), size, strict=True):
        places = jnp.linspace(0, x.shape[axis] - 1, new)
        low = jnp.clip(jnp.floor(places), 0, x.shape[axis] - 2).astype(int)
        share = jnp.expand_dims(places - low, [i for i in range(4) if i != axis])
        x = jnp.take(x, low, axis) * (1 - share) + jnp.take(x, low + 1, axis) * share
    return x


MODELS = (
    Model("residual net", TorchResNet, ResNet, images, resnet_weights),
    Model("u-net", TorchUNet, UNet, images, unet_weights),
    Model("vision transformer", TorchVit, Vit, images),
    Model("wave net", TorchWave, Wave, signals),
    Model("decoder", TorchDecoder, Decoder, features, rename=DECODER_NAMES),
)
