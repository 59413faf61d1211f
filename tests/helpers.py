"""What the tests of both wings share: seeds, cases, masks, weights carried over by hand, and measures."""

import os
import zlib
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import torch

SEED = int(os.environ.get("PARITY_TEST_SEED", "0"))

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
DTYPES = tuple(UNIT_ROUNDOFF)
HALVES = ("bfloat16", "float16")


def random(*name: Any) -> np.random.Generator:
    """Draw from a stream of its own for each name, so that tests do not depend on their order."""
    return np.random.default_rng([SEED, zlib.crc32(repr(name).encode())])


# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class Attention:
    """One attention module and the sizes of one call; `hides_zero` says what a 0 in a mask means."""

    name: str
    sizes: dict[str, Any]
    n: int
    lq: int
    lk: int
    id: str = field(default="")

    @property
    def hides_zero(self) -> bool:
        return self.name != "MultiHeadAttention"

    @property
    def width(self) -> int:
        return self.sizes.get("embed_size") or self.sizes["d_model"]

    @property
    def heads(self) -> int:
        return self.sizes.get("heads") or self.sizes["n_heads"]

    @property
    def scores(self) -> tuple[int, int, int, int]:
        return self.n, self.heads, self.lq, self.lk

    def inputs(self, style: str = "normal") -> list[np.ndarray]:
        """Query, key and value in the order in which this module takes them."""
        lengths = (self.lq, self.lk, self.lk) if self.name != "SelfAttention" else (self.lk, self.lk, self.lq)
        rng = random("inputs", self.name, self.id, style)
        return [STYLES[style](rng, (self.n, length, self.width)) for length in lengths]


def shifted(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Rows far from zero and close to each other: cancellation shows what plain noise hides."""
    return 2.0 + 0.01 * rng.standard_normal(shape) + rng.standard_normal((*shape[:-1], 1)) * 0.1


STYLES = {"normal": lambda rng, shape: rng.standard_normal(shape), "shifted": shifted}


def mha(d_model: int, n_heads: int, d_k: int, d_v: int, **options: Any) -> dict[str, Any]:
    return {"d_model": d_model, "n_heads": n_heads, "d_q": d_k, "d_k": d_k, "d_v": d_v, **options}


def two(embed_size: int, heads: int) -> dict[str, Any]:
    return {"embed_size": embed_size, "heads": heads}


# All sizes different; all sizes equal (a swapped axis keeps its shape there); one head; one token; one-wide heads.
UNEQUAL, SQUARE, ONE_HEAD, ONE_TOKEN, ONE_WIDE = (2, 5, 7), (4, 4, 4), (3, 2, 6), (2, 1, 1), (1, 9, 3)
SHAPES = {
    "unequal": (UNEQUAL, 24, 3),
    "square": (SQUARE, 16, 4),
    "one-head": (ONE_HEAD, 10, 1),
    "one-token": (ONE_TOKEN, 12, 2),
    "one-wide-heads": (ONE_WIDE, 8, 8),
}
ATTENTION = [
    Attention(name, two(width, heads), *lengths, id=f"{name}-{shape}")
    for name in ("Multi_Head_Self_Attention", "SelfAttention")
    for shape, (lengths, width, heads) in SHAPES.items()
] + [
    Attention("MultiHeadAttention", mha(24, 3, 5, 4), *UNEQUAL, id="MultiHeadAttention-d_v-narrower"),
    Attention("MultiHeadAttention", mha(24, 3, 4, 6, bias=True), *UNEQUAL, id="MultiHeadAttention-bias"),
    Attention("MultiHeadAttention", mha(16, 4, 4, 4, output_bias=True), *SQUARE, id="MultiHeadAttention-output-bias"),
    Attention("MultiHeadAttention", mha(10, 1, 48, 7, bias=True), *ONE_HEAD, id="MultiHeadAttention-one-head"),
    Attention("MultiHeadAttention", mha(12, 2, 3, 5), *ONE_TOKEN, id="MultiHeadAttention-one-token"),
    Attention("MultiHeadAttention", mha(8, 8, 1, 1), *ONE_WIDE, id="MultiHeadAttention-one-wide-heads"),
]
BY_ID = {case.id: case for case in ATTENTION}
MAIN = [BY_ID[i] for i in ("Multi_Head_Self_Attention-unequal", "SelfAttention-unequal", "MultiHeadAttention-bias")]


# ---------------------------------------------------------------- masks

MASK_SHAPES = {
    "(Lk,)": lambda n, h, lq, lk: (lk,),
    "(Lq,Lk)": lambda n, h, lq, lk: (lq, lk),
    "(1,1,Lq,Lk)": lambda n, h, lq, lk: (1, 1, lq, lk),
    "(N,1,1,Lk)": lambda n, h, lq, lk: (n, 1, 1, lk),
    "(N,1,Lq,Lk)": lambda n, h, lq, lk: (n, 1, lq, lk),
    "(N,h,Lq,Lk)": lambda n, h, lq, lk: (n, h, lq, lk),
}
# Whatever is not 0 counts the same, so the numbers are not all 1.
MASK_NUMBERS = {
    "bool": [True],
    "uint8": [1, 255],
    "int32": [1, 2, -3],
    "float32": [1.0, 0.25, -2.0],
    "float16": [1.0, 6e-8],
    "int64": [1, -1, 2**40],
}


def mask_array(case: Attention, form: str, dtype: str = "bool", fully_hidden: bool = False) -> np.ndarray:
    """Make a mask in the meaning of the case's module; each query keeps a key unless `fully_hidden`.

    Then the second query (or all queries, where the form does not tell them apart) loses every key.
    """
    rng = random("mask", case.id, form, dtype, fully_hidden)
    shape = MASK_SHAPES[form](*case.scores)
    hidden = rng.random(shape) < 0.5
    hidden[..., 0] = rng.random(hidden.shape[:-1]) < 0.5
    hidden[..., -1] &= ~hidden[..., 0]
    if fully_hidden:
        if hidden.ndim == 1 or hidden.shape[-2] == 1:
            hidden[...] = True
        else:
            hidden[..., 1, :] = True
    number = rng.choice(np.array(MASK_NUMBERS[dtype], dtype), shape)
    return np.where(~hidden if case.hides_zero else hidden, number, np.zeros((), dtype)).astype(dtype)


# ---------------------------------------------------------------- torch and numpy

NUMPY_DTYPE = {"bfloat16": ml_dtypes.bfloat16}


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(NUMPY_DTYPE.get(name, name))


def to_torch(x: np.ndarray, dtype: str | None = None) -> torch.Tensor:
    """Copy an array to torch, in its own dtype or in `dtype`."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    t = torch.from_numpy(np.array(x))
    return t if dtype is None else t.to(getattr(torch, dtype))


def to_numpy(t: torch.Tensor) -> np.ndarray:
    t = t.detach().contiguous()
    if t.dtype == torch.bfloat16:
        return t.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return t.numpy()


def fill(module: torch.nn.Module, dtype: str, *name: Any) -> torch.nn.Module:
    """Give every parameter random values, biases included and far from zero, and a dtype."""
    rng = random("weights", type(module).__name__, *name)
    module.to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in module.parameters():
            spread = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape) * spread))
    return module


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Same dtype, shape, NaN positions and bits; signs of zeros count, payloads of NaN do not."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual.isnan(), expected.isnan()), "NaN in different places"
    zero = torch.zeros((), dtype=actual.dtype)
    a, e = (torch.where(x.isnan(), zero, x) for x in (actual, expected))
    assert torch.equal(a, e), f"largest difference {(a.double() - e.double()).abs().max():.3g}"
    assert torch.equal(a.signbit(), e.signbit()), "zeros of different sign"


def assert_close(actual: np.ndarray, expected: np.ndarray, units: float, scale: float | None = None, what: str = "") -> None:
    """Compare within `units` times unit roundoff times scale (by default the largest expected value).

    NaN must stand in the same places. One scale serves a whole array: elements near zero carry
    the rounding of the large ones that cancelled in them.
    """
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} for {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} for {expected.shape}"
    u = UNIT_ROUNDOFF[str(expected.dtype)]
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(a), np.isnan(e), err_msg=f"{what}: NaN in different places")
    good = ~np.isnan(e)
    if not good.any():
        return
    scale = np.abs(e[good]).max() if scale is None else scale
    difference = np.abs(a - e)[good].max()
    # Multiplied, not divided: where everything expected is 0 only 0 will do.
    assert difference <= units * u * scale, f"{what}: off by {difference:.3g} at scale {scale:.3g}, allowed {units:g} u·scale"


# ---------------------------------------------------------------- jax


def to_jax(x: np.ndarray | torch.Tensor, dtype: str | None = None) -> Any:
    import jax.numpy as jnp

    x = to_numpy(x) if isinstance(x, torch.Tensor) else x
    return jnp.array(x if dtype is None else x.astype(numpy_dtype(dtype)))


def linears(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}


def jax_layer(module: Any, path: str) -> Any:
    """The layer of a Flax module that stands at a torch path."""
    for part in path.split(".") if path else ():
        module = getattr(module, "layers", module)[int(part)] if part.isdigit() else getattr(module, part)
    return module


# The leaves of each kind of layer: torch's name, then Flax's. A kernel is transposed.
LEAVES: dict[type[torch.nn.Module], tuple[tuple[str, str], ...]] = {
    torch.nn.Linear: (("weight", "kernel"), ("bias", "bias")),
    torch.nn.LayerNorm: (("weight", "scale"), ("bias", "bias")),
    torch.nn.RMSNorm: (("weight", "scale"),),
    torch.nn.Embedding: (("weight", "embedding"),),
}


def jax_leaves(module: torch.nn.Module, twin: Any) -> dict[str, tuple[Any, bool]]:
    """The twin's variable for each of torch's parameters, by torch's path, and whether it is transposed."""
    found = {}
    for path, layer in module.named_modules():
        for ours, theirs in next((leaves for kind, leaves in LEAVES.items() if isinstance(layer, kind)), ()):
            if getattr(layer, ours) is not None:
                found[f"{path}.{ours}" if path else ours] = getattr(jax_layer(twin, path), theirs), theirs == "kernel"
    assert found.keys() == dict(module.named_parameters()).keys()
    return found


def mirror(module: torch.nn.Module, **arguments: Any) -> Any:
    """Build the Flax twin of a torch module and carry the weights over by hand."""
    from flax import nnx

    import jax_impl

    twin = getattr(jax_impl, type(module).__name__)(**arguments, rngs=nnx.Rngs(0))
    state = dict(module.named_parameters())
    for path, (variable, transposed) in jax_leaves(module, twin).items():
        array = to_numpy(state[path])
        variable.set_value(to_jax(array.T if transposed else array))
    return twin


def build(case: Attention, dtype: str) -> torch.nn.Module:
    import torch_impl

    return fill(getattr(torch_impl, case.name)(**case.sizes), dtype, case.id)
