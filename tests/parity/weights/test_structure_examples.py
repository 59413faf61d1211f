"""Whole small models whose checkpoint is built otherwise than the Flax model: run on both sides, there and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers import random
from torch import nn

import parity

# Heads of LLaMA are wider: of width 4, its permutation would be its own inverse.
N, L, E, H, KV, D, W = 2, 5, 8, 4, 2, 2, 6
LAYERS = 3


def drawn(model: nn.Module, *name: object) -> nn.Module:
    """The model in float64, every parameter random and no bias 0."""
    rng = random("structure", *name)
    model = model.double().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.from_numpy(rng.standard_normal(tuple(tensor.shape))))
    return model


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over (batch, length, heads, width)."""
    scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return torch.einsum("nhqk,nkhd->nqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(2)


def attend_flax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / q.shape[-1] ** 0.5
    hidden = jnp.triu(jnp.ones((q.shape[1], q.shape[1]), bool), 1)
    out = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(jnp.where(hidden, -jnp.inf, scores), -1), v)
    return out.reshape(*out.shape[:2], -1)


def dense(inputs: int, outputs: int) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, param_dtype=jnp.float64, dtype=jnp.float64, rngs=nnx.Rngs(0))


# ---------------------------------------------------------------- GPT-2: (in, out) weights, one for q, k and v


class Conv1D(nn.Module):
    """A layer with its weight as GPT-2 has it: inputs first."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class GPT2(nn.Module):
    def __init__(self):
        super().__init__()
        parts = {"c_attn": (E, 3 * E), "c_proj": (E, E), "c_fc": (E, 12), "c_out": (12, E)}
        self.h = nn.ModuleList(nn.ModuleDict({name: Conv1D(*sizes) for name, sizes in parts.items()}) for _ in range(2))

    def forward(self, x):
        for block in self.h:
            q, k, v = (part.unflatten(-1, (H, D)) for part in block["c_attn"](x).split(E, -1))
            x = x + block["c_proj"](attend(q, k, v))
            x = x + block["c_out"](torch.tanh(block["c_fc"](x)))
        return x


class SeparateBlock(nnx.Module):
    def __init__(self):
        self.q, self.k, self.v, self.out = (dense(E, E) for _ in range(4))
        self.fc, self.proj = dense(E, 12), dense(12, E)

    def __call__(self, x):
        q, k, v = (layer(x).reshape(*x.shape[:2], H, D) for layer in (self.q, self.k, self.v))
        x = x + self.out(attend_flax(q, k, v))
        return x + self.proj(jnp.tanh(self.fc(x)))


class Separate(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([SeparateBlock() for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


GPT2_NAMES = {
    **{f"h.{{i}}.c_attn.weight[:, {n * E}:{n * E + E}]": f"blocks.{{i}}.{c}.kernel | as is" for n, c in enumerate("qkv")},
    **{f"h.{{i}}.c_attn.bias[{n * E}:{n * E + E}]": f"blocks.{{i}}.{c}.bias" for n, c in enumerate("qkv")},
    **{
        f"h.{{i}}.{old}.{end}": f"blocks.{{i}}.{new}.{'kernel | as is' if end == 'weight' else end}"
        for old, new in (("c_proj", "out"), ("c_fc", "fc"), ("c_out", "proj"))
        for end in ("weight", "bias")
    },
}

# ---------------------------------------------------------------- NeoX: query, key and value of each head together


class NeoX(nn.Module):
    def __init__(self):
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x):
        q, k, v = self.query_key_value(x).unflatten(-1, (H, 3, D)).unbind(-2)
        return self.dense(attend(q, k, v))


class Fused(nnx.Module):
    """All queries, all keys, all values."""

    def __init__(self):
        self.qkv, self.dense = dense(E, 3 * E), dense(E, E)

    def __call__(self, x):
        q, k, v = (part.reshape(*x.shape[:2], H, D) for part in jnp.split(self.qkv(x), 3, -1))
        return self.dense(attend_flax(q, k, v))


class Three(nnx.Module):
    def __init__(self):
        self.q, self.k, self.v, self.dense = (dense(E, E) for _ in range(4))

    def __call__(self, x):
        q, k, v = (layer(x).reshape(*x.shape[:2], H, D) for layer in (self.q, self.k, self.v))
        return self.dense(attend_flax(q, k, v))


FUSED_NAMES = {
    f"query_key_value.{old}": f"qkv.{new} | qkv per head({H})" for old, new in (("weight", "kernel"), ("bias", "bias"))
}
THREE_NAMES = {
    f"query_key_value.{old} | qkv per head({H}) | [{n * E}:{n * E + E}]": f"{c}.{new}"
    for old, new in (("weight", "kernel"), ("bias", "bias"))
    for n, c in enumerate("qkv")
}

# ---------------------------------------------------------------- LLaMA: grouped queries, halves rotated


def angles(width: int) -> np.ndarray:
    return np.outer(np.arange(L), 100.0 ** (-np.arange(width // 2) / width))


class Llama(nn.Module):
    """Rotates the first half of each head against the second, as Hugging Face does."""

    def __init__(self, fused: bool = False):
        super().__init__()
        self.fused = fused
        if fused:
            self.wqkv = nn.Linear(E, (H + 2 * KV) * W, bias=False)
        else:
            self.q_proj = nn.Linear(E, H * W, bias=False)
            self.k_proj, self.v_proj = nn.Linear(E, KV * W, bias=False), nn.Linear(E, KV * W, bias=False)
        self.o_proj = nn.Linear(H * W, E, bias=False)

    def rotated(self, x):
        cos, sin = (torch.from_numpy(f(angles(W))).repeat(1, 2)[:, None] for f in (np.cos, np.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def forward(self, x):
        if self.fused:
            groups = self.wqkv(x).unflatten(-1, (KV, H // KV + 2, W))
            q, k, v = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        else:
            q, k, v = (layer(x).unflatten(-1, (-1, W)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (part.repeat_interleave(H // KV, 2) for part in (self.rotated(k), v))
        return self.o_proj(attend(self.rotated(q), k, v))


class FlaxLlama(nnx.Module):
    """Rotates neighbours; its kernels have an axis for the heads."""

    def __init__(self, interleaved: bool = True):
        shapes = {"q": (E, H, W), "k": (E, KV, W), "v": (E, KV, W), "out": (H, W, E)}
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.zeros(shape)))

    def rotated(self, x):
        cos, sin = (jnp.asarray(f(angles(W)))[:, None] for f in (np.cos, np.sin))
        even, odd = x[..., 0::2], x[..., 1::2]
        return jnp.stack((even * cos - odd * sin, odd * cos + even * sin), -1).reshape(x.shape)

    def __call__(self, x):
        q, k, v = (jnp.einsum("nle,ehd->nlhd", x, kernel[...]) for kernel in (self.q, self.k, self.v))
        k, v = (jnp.repeat(part, H // KV, 2) for part in (self.rotated(k), v))
        mixed = attend_flax(self.rotated(q), k, v)
        return mixed @ self.out[...].reshape(-1, E)


LLAMA_NAMES = {
    "q_proj.weight": f"q | rotary({H}) | heads",
    "k_proj.weight": f"k | rotary({KV}) | heads",
    "v_proj.weight": "v | heads",
    "o_proj.weight": "out | heads in",
}
QKV = f"wqkv.weight | grouped({H}, {KV}) | "
GROUPED_NAMES = {
    f"{QKV}[0:{W * H}]": f"q | rotary({H}) | heads",
    f"{QKV}[{W * H}:{W * (H + KV)}]": f"k | rotary({KV}) | heads",
    f"{QKV}[{W * (H + KV)}:]": "v | heads",
    "o_proj.weight": "out | heads in",
}

# ---------------------------------------------------------------- images, flattened


class CNN(nn.Module):
    """Flattens (C, H, W) before a square layer, and folds into (C, H, W) behind another."""

    def __init__(self):
        super().__init__()
        self.conv, self.square = nn.Conv2d(3, 4, 2), nn.Linear(24, 24)
        self.norm, self.fold = nn.LayerNorm(24), nn.Linear(24, 24)

    def forward(self, x):
        x = self.conv(x).flatten(1)
        return self.fold(self.square(torch.tanh(self.norm(x)))).unflatten(1, (4, 3, 2))


class FlaxCNN(nnx.Module):
    def __init__(self):
        options = dict(param_dtype=jnp.float64, dtype=jnp.float64, rngs=nnx.Rngs(0))
        self.conv, self.square = nnx.Conv(3, 4, (2, 2), padding="VALID", **options), dense(24, 24)
        self.norm = nnx.LayerNorm(24, epsilon=1e-5, use_fast_variance=False, **options)
        self.fold = dense(24, 24)

    def __call__(self, x):
        x = self.conv(x.transpose(0, 2, 3, 1)).reshape(len(x), -1)
        return self.fold(self.square(jnp.tanh(self.norm(x)))).reshape(-1, 3, 2, 4).transpose(0, 3, 1, 2)


CNN_NAMES = {
    "norm.weight": "norm.scale | flatten(4, 3, 2)",
    "norm.bias": "norm.bias | flatten(4, 3, 2)",
    "square.weight": "square.kernel | flatten(4, 3, 2)",
    "fold.weight": "fold.kernel | unflatten(4, 3, 2)",
    "fold.bias": "fold.bias | unflatten(4, 3, 2)",
}

# ---------------------------------------------------------------- layers in a stack


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(E), "fc": nn.Linear(E, E)}) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer["fc"](layer["norm"](x)))
        return x


class FlaxLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: str = "float64"):
        options = dict(param_dtype=dtype, dtype=None, rngs=rngs)
        self.norm = nnx.LayerNorm(E, epsilon=1e-5, use_fast_variance=False, **options)
        self.fc = nnx.Linear(E, E, **options)

    def __call__(self, x):
        return x + jnp.tanh(self.fc(self.norm(x)))


class Scanned(nnx.Module):
    """One layer whose parameters have an axis for its repetitions."""

    def __init__(self, dtype: str = "float64"):
        self.layers = nnx.vmap(lambda rngs: FlaxLayer(rngs, dtype))(nnx.Rngs(0).split(LAYERS))

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class Stacked1(Scanned):
    """The kernels alone are stacked on axis 1, as MaxText has them."""

    def __init__(self):
        super().__init__()
        kernel = self.layers.fc.kernel
        kernel.set_value(jnp.moveaxis(kernel[...], 0, 1))

    def __call__(self, x):
        for i in range(LAYERS):
            leaf = self.layers
            mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
            normed = (x - mean) / jnp.sqrt(var + 1e-5) * leaf.norm.scale[...][i] + leaf.norm.bias[...][i]
            x = x + jnp.tanh(normed @ leaf.fc.kernel[...][:, i] + leaf.fc.bias[...][i])
        return x


STACKED = {"layers.{i}": "layers[{i}]"}

# ---------------------------------------------------------------- all of them

EXAMPLES = {
    "gpt2": (GPT2, Separate, GPT2_NAMES, (N, L, E)),
    "neox-fused": (NeoX, Fused, FUSED_NAMES, (N, L, E)),
    "neox-three": (NeoX, Three, THREE_NAMES, (N, L, E)),
    "llama": (Llama, FlaxLlama, LLAMA_NAMES, (N, L, E)),
    "llama-grouped": (lambda: Llama(fused=True), FlaxLlama, GROUPED_NAMES, (N, L, E)),
    "cnn": (CNN, FlaxCNN, CNN_NAMES, (N, 3, 4, 3)),
    "scanned": (Tower, Scanned, STACKED, (N, L, E)),
    "scanned-axis-1": (
        Tower,
        Stacked1,
        {**STACKED, "layers.{i}.fc.weight": "layers.fc.kernel[:, {i}]"},
        (N, L, E),
    ),
}


def gap(torch_model: nn.Module, flax_model: nnx.Module, x: np.ndarray) -> float:
    """The largest difference of the outputs, over the largest output."""
    with torch.no_grad():
        expected = torch_model(torch.from_numpy(x)).numpy()
    return float(np.abs(np.asarray(flax_model(jnp.asarray(x))) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_flax_model_computes_what_torch_does_and_all_of_it_comes_back(name):
    make_torch, make_flax, rename, shape = EXAMPLES[name]
    source, x = drawn(make_torch(), name), random("structure", name, "x").standard_normal(shape)
    with jax.enable_x64(True):
        target = make_flax()
        done = parity.transfer(source, target, rename=rename, cast="source")
        assert gap(source, target, x) < 1e-13
        back = parity.transfer(target, drawn(make_torch(), name, "back"), rename=rename).value
        assert all(torch.equal(back.state_dict()[key], tensor) for key, tensor in source.state_dict().items())
        # Trees have no layers to ask, but what rename says is all that they need, and where it says nothing, names tell.
        if name != "cnn":
            tree = parity.transfer(source.state_dict(), nnx.state(target), rename=rename, cast="source").value
            assert all(
                bool((a[...] == b[...]).all()) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(nnx.state(target)))
            )
        # What was paired can be passed again, leaf by leaf.
        again = make_flax()
        assert parity.transfer(source, again, rename=done.rename, cast="source").rename == done.rename
        assert gap(source, again, x) < 1e-13


# A mistake of layout that no shape shows, and the example in which it is made.
FAULTS = {
    "transposed-for-as-is": ("gpt2", "h.{i}.c_proj.weight", "blocks.{i}.out.kernel | transposed"),
    "heads-not-taken-apart": ("neox-fused", "query_key_value.weight", "qkv.kernel | transposed"),
    "rotary-of-queries-alone": ("llama", "k_proj.weight", "k | heads"),
    "rotary-the-wrong-way": ("llama", "q_proj.weight", f"q | inverse rotary({H}) | heads"),
    "rotary-over-too-few-heads": ("llama", "k_proj.weight", "k | rotary(1) | heads"),
    "no-flatten": ("cnn", "square.weight", "square.kernel"),
    "flatten-with-fewer-channels": ("cnn", "square.weight", "square.kernel | flatten(3, 4, 2)"),
    "not-transposed": ("cnn", "square.weight", "square.kernel | flatten(4, 3, 2) | as is"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_example_can_fail(fault):
    name, key, value = FAULTS[fault]
    make_torch, make_flax, rename, shape = EXAMPLES[name]
    source, x = drawn(make_torch(), name), random("structure", name, "x").standard_normal(shape)
    with jax.enable_x64(True):
        target = make_flax()
        parity.transfer(source, target, rename=rename | {key: value}, cast="source")
        assert gap(source, target, x) > 1e-3


def test_a_stack_is_compared_on_every_level():
    source, target = drawn(Tower(), "compared").float(), Scanned("float32")
    parity.transfer(source, target, rename=STACKED)
    x = random("structure", "compared").standard_normal((N, L, E)).astype(np.float32)
    report = parity.compare(source, target, x, rename=STACKED)
    assert report.passed, str(report)
    assert {level.level for level in report.levels if level.passed} >= {"weights", "identical", "native", "gradients"}
    # One weight of one layer of the stack, by one ulp.
    kernel = target.layers.fc.kernel
    kernel.set_value(kernel[...].at[1, 2, 3].set(jnp.nextafter(kernel[...][1, 2, 3], jnp.inf)))
    report = parity.compare(source, target, x, rename=STACKED, levels=["weights"])
    assert "layers.1.fc.weight" in str(report) and "layers.fc.kernel[1]" in str(report)
