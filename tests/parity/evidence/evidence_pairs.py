"""Small pairs of models for the tests of the evidence: a torch module, its Flax twin, and twins with one planted fault."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

import parity

HIDDEN = -1e20


def random(*name: Any) -> np.random.Generator:
    return np.random.default_rng([ord(letter) for letter in repr(name)])


def draw(model: nn.Module, *name: Any) -> nn.Module:
    """Random values for every parameter, biases included, and eval mode."""
    rng = random("weights", *name)
    with torch.no_grad():
        for p in model.parameters():
            values = rng.standard_normal(tuple(p.shape)) * (1.0 if p.ndim == 1 else p.shape[-1] ** -0.5)
            p.copy_(torch.from_numpy(np.array(values)))
    return model.eval()


def transferred(torch_model: nn.Module, flax_model: nnx.Module, *name: Any, **options: Any) -> tuple[nn.Module, nnx.Module]:
    draw(torch_model, *name)
    flax_model.eval()
    parity.transfer(torch_model, flax_model, **options)
    return torch_model, flax_model


def normal(*shape: int, name: Any = 0, dtype: Any = np.float32) -> np.ndarray:
    return random("input", shape, name).standard_normal(shape).astype(dtype)


# ------------------------------------------------------------------------------ attention

WIDTH, HEADS = 8, 2


class TorchCore(nn.Module):
    def forward(self, q, k, v, mask):
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = torch.softmax(scores.masked_fill(mask, HIDDEN), -1)
        return weights @ v, weights


class TorchAttention(nn.Module):
    """Projections `q`, `k`, `v`, a parameterless `core`, and `out`; returns the output and the weights."""

    def __init__(self):
        super().__init__()
        # Not in alphabetical order: torch's order of calls counts.
        self.v, self.k, self.q = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.core = TorchCore()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, query, key, value, mask):
        n = query.shape[0]

        def split(x):
            return x.reshape(n, -1, HEADS, WIDTH // HEADS).transpose(1, 2)

        mixed, weights = self.core(split(self.q(query)), split(self.k(key)), split(self.v(value)), mask)
        return self.out(mixed.transpose(1, 2).reshape(n, -1, WIDTH)), weights


def tf32(x):
    """Cut a float32 mantissa to 10 bits, as a tensor core does; other dtypes stay."""
    if x.dtype != jnp.float32:
        return x
    bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(x), jnp.uint32) + jnp.uint32(1 << 12)
    cut = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFE000), jnp.float32)
    # Added as a difference, so that the gradient passes; the difference is exact.
    return x + jax.lax.stop_gradient(cut - x)


@jax.custom_vjp
def doubled_gradient(x):
    return x


doubled_gradient.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


class FlaxCore(nnx.Module):
    def __init__(self, fault: str = ""):
        self.fault = fault

    def __call__(self, q, k, v, mask):
        scale = math.sqrt(WIDTH if self.fault == "scale" else q.shape[-1])
        if self.fault == "mask off by one":
            mask = jnp.roll(mask, 1, -1)
        if self.fault == "mask inverted":
            mask = ~mask
        if self.fault == "tf32":
            q, k, v = tf32(q), tf32(k), tf32(v)
        hidden = -jnp.inf if self.fault == "nan" else HIDDEN
        weights = jax.nn.softmax(jnp.where(mask, hidden, q @ jnp.swapaxes(k, -1, -2) / scale), -1)
        if self.fault == "bf16":
            v = v.astype(jnp.bfloat16).astype(q.dtype)
        if self.fault == "gradient":
            v = doubled_gradient(v)
        return (tf32(weights) if self.fault == "tf32" else weights) @ v, weights


class FlaxAttention(nnx.Module):
    def __init__(self, fault: str = "", *, rngs: nnx.Rngs):
        self.fault = fault
        self.q, self.k, self.v = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))
        self.core = FlaxCore(fault)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=fault != "no bias", rngs=rngs)

    def __call__(self, query, key, value, mask):
        n = query.shape[0]
        if self.fault == "raises":
            raise ValueError("no such axis")
        if self.fault == "key and value swapped":
            key, value = value, key

        def split(x):
            if self.fault == "split by reshape":
                return x.reshape(n, HEADS, -1, WIDTH // HEADS)
            return x.reshape(n, -1, HEADS, WIDTH // HEADS).swapaxes(1, 2)

        mixed, weights = self.core(split(self.q(query)), split(self.k(key)), split(self.v(value)), mask)
        mixed = mixed.reshape(n, -1, WIDTH) if self.fault == "merged by reshape" else mixed.swapaxes(1, 2).reshape(n, -1, WIDTH)
        if self.fault == "kernel transposed in code":
            output = mixed @ self.out.kernel[...].T + self.out.bias[...]
        elif self.fault == "gradient stopped":
            output = mixed @ jax.lax.stop_gradient(self.out.kernel[...]) + self.out.bias[...]
        else:
            output = self.out(mixed)
        return {
            "output missing": lambda: output,
            "output extra": lambda: (output, weights, weights),
            "dtype": lambda: (output.astype(jnp.float16), weights),
            "shape": lambda: (output[:, None], weights),
        }.get(self.fault, lambda: (output, weights))()


def attention(fault: str = "") -> tuple[nn.Module, nnx.Module]:
    """The pair; a fault is planted in the Flax code, or with `ignore` needed for what it leaves out."""
    torch_model, flax_model = draw(TorchAttention(), "attention"), FlaxAttention(fault, rngs=nnx.Rngs(0))
    flax_model.eval()
    source = {n: t for n, t in torch_model.state_dict().items() if not (fault == "no bias" and n == "out.bias")}
    parity.transfer(source, flax_model)
    return torch_model, flax_model


def attention_inputs() -> tuple[Any, ...]:
    """Query, key, value, all (3, 4, width), and a mask that hides one whole row."""
    mask = np.triu(np.ones((4, 4), bool), 1)[None, None].repeat(3, 0)
    mask[1, 0, 2] = True  # its third query sees nothing
    return (*(normal(3, 4, WIDTH, name=name) for name in "qkv"), mask)


def altered(flax_model: nnx.Module, path: str, change: Any) -> None:
    """Change one variable of a Flax model by a function of its NumPy array."""
    variable = flax_model
    for part in path.split("."):
        variable = variable[int(part)] if part.isdigit() else getattr(variable, part)
    variable.set_value(jnp.asarray(change(np.array(variable.get_value()))))


def one_ulp(array: np.ndarray) -> np.ndarray:
    array.flat[3] = np.nextafter(array.flat[3], np.inf, dtype=array.dtype)
    return array


# ------------------------------------------------------------------------------ norm, activation, embedding


class TorchBlock(nn.Module):
    """LayerNorm, then a feed-forward network with GELU."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.act = nn.GELU()
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class FlaxGELU(nnx.Module):
    def __init__(self, approximate: bool):
        self.approximate = approximate

    def __call__(self, x):
        return jax.nn.gelu(x, approximate=self.approximate)


class FlaxBlock(nnx.Module):
    def __init__(self, fault: str = "", *, rngs: nnx.Rngs):
        epsilon = 1e-6 if fault == "epsilon" else 1e-5
        self.norm = nnx.LayerNorm(WIDTH, epsilon=epsilon, use_fast_variance=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 12, rngs=rngs)
        self.act = FlaxGELU(fault == "tanh gelu")
        self.down = nnx.Linear(12, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def block(fault: str = "") -> tuple[nn.Module, nnx.Module]:
    return transferred(TorchBlock(), FlaxBlock(fault, rngs=nnx.Rngs(0)), "block")


def low_variance(*shape: int) -> np.ndarray:
    """Rows whose variance is about that of an epsilon of 1e-5."""
    rng = random("low variance", shape)
    return (3e-3 * rng.standard_normal(shape) + rng.standard_normal((*shape[:-1], 1))).astype(np.float32)


class TorchReLU(nn.Module):
    def forward(self, x):
        return torch.relu(x)


class FlaxReLU(nnx.Module):
    def __init__(self, fault: str = ""):
        self.fault = fault

    def __call__(self, x):
        return jnp.maximum(x, 0) if self.fault else jax.nn.relu(x)


class TorchTwo(nn.Module):
    """Two layers, the first called twice, in another order than the alphabet's."""

    def __init__(self):
        super().__init__()
        self.b, self.a, self.act = nn.Linear(4, 4), nn.Linear(4, 4), TorchReLU()

    def forward(self, x):
        return self.a(self.act(self.b(self.b(x))))


class FlaxTwo(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.a, self.b, self.act = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs), FlaxReLU()

    def __call__(self, x):
        return self.a(self.act(self.b(self.b(x))))


def two(flax_class: type = FlaxTwo, torch_class: type = TorchTwo) -> tuple[nn.Module, nnx.Module]:
    return transferred(torch_class(), flax_class(rngs=nnx.Rngs(0)), "two")
