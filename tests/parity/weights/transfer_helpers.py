"""Models in both frameworks, filled with random bits, and their leaves read without the help of parity."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from helpers import numpy_dtype, random
from torch import nn

torch.set_num_threads(1)

# What a float may hold besides ordinary numbers: -0.0, infinities, denormals and NaN with payloads, by width.
SPECIAL = {
    "float64": [0x8000000000000000, 0x7FF0000000000000, 0xFFF0000000000000, 1, 0x7FF8000000000ABC, 0xFFF0000000000123],
    "float32": [0x80000000, 0x7F800000, 0xFF800000, 1, 0x7FC00ABC, 0xFF800123],
    "float16": [0x8000, 0x7C00, 0xFC00, 1, 0x7EBC, 0xFC23],
    "bfloat16": [0x8000, 0x7F80, 0xFF80, 1, 0x7FCB, 0xFF81],
}


def any_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random bits, NaN and all, with every special value among them where there is room."""
    if dtype == "bool":
        return rng.random(shape) < 0.5
    width = numpy_dtype(dtype).itemsize
    found = rng.integers(1, 2 ** (8 * width), shape, dtype=np.uint64).astype(f"uint{8 * width}")
    for place, special in zip(range(0, found.size, 2), SPECIAL.get(dtype, ())):
        found.reshape(-1)[place] = special
    return found.view(numpy_dtype(dtype))


def to_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    if dtype == "bool":
        return torch.from_numpy(array.copy())
    carrier = array.view(f"int{8 * array.dtype.itemsize}").copy()
    return torch.from_numpy(carrier).view(getattr(torch, dtype))


Bits = tuple[str, tuple[int, ...], bytes]


def bits(array: Any) -> Bits:
    """Dtype, shape and bytes in row-major order."""
    if isinstance(array, torch.Tensor):
        flat = array.detach().contiguous().reshape(-1)
        dtype = str(array.dtype).removeprefix("torch.")
        return dtype, tuple(array.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    if isinstance(array, jax.ShapeDtypeStruct):
        return str(array.dtype), tuple(array.shape), b"abstract"
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return str(array.dtype), tuple(array.shape), np.asarray(array).tobytes()


def transposed(leaf: Bits) -> Bits:
    dtype, shape, data = leaf
    array = np.frombuffer(data, f"uint{8 * numpy_dtype(dtype).itemsize}").reshape(shape)
    return dtype, shape[::-1], array.T.tobytes()


def snapshot(value: Any) -> dict[str, Bits]:
    """Every leaf of a model or tree by its path, random state included."""
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if isinstance(value, nnx.Module):
        value = nnx.state(value)
    if isinstance(value, nnx.State):
        value = {
            ".".join(map(str, path)): leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
            for path, leaf in nnx.to_flat_state(value)
        }
    return {path: bits(leaf) for path, leaf in value.items()}


def scramble(model: Any, *name: Any, dtype: str | None = None) -> Any:
    """Put random bits into every leaf of a model; floats take on `dtype` if it is given."""
    rng = random("transfer", *name)
    if isinstance(model, nn.Module):
        for tensor in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values():
            kept = dtype if dtype and tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
            tensor.data = to_tensor(any_bits(rng, tuple(tensor.shape), kept), kept)
        return model
    for _, variable in nnx.to_flat_state(nnx.state(model)):
        if not isinstance(variable, nnx.RngState):
            value = variable.get_value()
            kept = dtype if dtype and jnp.issubdtype(value.dtype, jnp.floating) else str(value.dtype)
            variable.set_value(jnp.array(any_bits(rng, value.shape, kept)))
    return model


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


class Steps(nnx.Variable):
    pass


class TorchBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Dropout(0.25), nn.Linear(7, 5))
        self.norm1 = nn.LayerNorm(5)


class FlaxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.model = nnx.Sequential(
            nnx.Linear(5, 7, rngs=rngs), jax.nn.relu, nnx.Dropout(0.25, rngs=rngs), nnx.Linear(7, 5, rngs=rngs)
        )
        self.norm1 = nnx.LayerNorm(5, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


class TorchNet(nn.Module):
    """A list called layers around Sequentials, a dict, a square layer, parameters and buffers of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.layers = nn.ModuleList([TorchBlock(), TorchBlock()])
        self.heads = nn.ModuleDict({"left": nn.Linear(5, 1), "right": nn.Linear(5, 5, bias=False)})
        self.kernel = nn.Parameter(torch.zeros(3, 3))
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.gain = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int32))
        self.register_buffer("seen", torch.zeros(2, 3, dtype=torch.bool))


class FlaxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(11, 5, rngs=rngs)
        self.layers = nnx.List([FlaxBlock(rngs), FlaxBlock(rngs)])
        self.heads = nnx.Dict(left=nnx.Linear(5, 1, rngs=rngs), right=nnx.Linear(5, 5, use_bias=False, rngs=rngs))
        self.kernel = nnx.Param(jnp.zeros((3, 3)))
        self.weight = nnx.Param(jnp.zeros((2, 2)))
        self.gain = nnx.Param(jnp.zeros(()))
        self.empty = nnx.Param(jnp.zeros((0, 3)))
        self.steps = Steps(jnp.zeros(3, jnp.int32))
        self.seen = nnx.BatchStat(jnp.zeros((2, 3), bool))


@functools.cache
def template() -> tuple[Any, Any]:
    """Initialising a Flax model costs far more than copying one."""
    # Whichever test asks first: one that does so with 64-bit types must not leave a wide model to the others.
    with jax.enable_x64(False):
        return nnx.split(FlaxNet(rngs()))


def flax_net() -> FlaxNet:
    graph, state = template()
    return nnx.merge(graph, jax.tree.map(lambda a: a.copy(), state))


# Written out by hand: torch's name, Flax's name, whether Flax stores it transposed.
NAMES = [
    ("embed.weight", "embed.embedding", False),
    *[
        (f"layers.{i}.{torch_name}", f"layers.{i}.{flax_name}", flips)
        for i in range(2)
        for torch_name, flax_name, flips in [
            ("model.0.weight", "model.layers.0.kernel", True),
            ("model.0.bias", "model.layers.0.bias", False),
            ("model.3.weight", "model.layers.3.kernel", True),
            ("model.3.bias", "model.layers.3.bias", False),
            ("norm1.weight", "norm1.scale", False),
            ("norm1.bias", "norm1.bias", False),
        ]
    ],
    ("heads.left.weight", "heads.left.kernel", True),
    ("heads.left.bias", "heads.left.bias", False),
    ("heads.right.weight", "heads.right.kernel", True),
    *[(name, name, False) for name in ("kernel", "weight", "gain", "empty", "steps", "seen")],
]


def in_torch(flax: dict[str, Bits]) -> dict[str, Bits]:
    return {t: transposed(flax[f]) if flips else flax[f] for t, f, flips in NAMES}


def in_flax(torch_: dict[str, Bits]) -> dict[str, Bits]:
    return {f: transposed(torch_[t]) if flips else torch_[t] for t, f, flips in NAMES}


def arrays_only(flax: dict[str, Bits]) -> dict[str, Bits]:
    """Without random state."""
    return {path: leaf for path, leaf in flax.items() if ".rngs." not in path}


class Holder(nn.Module):
    """Parameters and buffers by name."""

    def __init__(self, buffers: tuple[str, ...] = (), **tensors: torch.Tensor):
        super().__init__()
        for name, tensor in tensors.items():
            if name in buffers or not tensor.is_floating_point():
                self.register_buffer(name, tensor)
            else:
                setattr(self, name, nn.Parameter(tensor))


class FlaxHolder(nnx.Module):
    """Params by name."""

    def __init__(self, **arrays: Any):
        for name, array in arrays.items():
            setattr(self, name, array if isinstance(array, nnx.Variable) else nnx.Param(array))
