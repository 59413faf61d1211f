"""Faithful pairs of random shapes, and random numbers for them: what a checker must call equal.

The pairs are those that the tests and the catalogue of faults have already, without a fault: the wings' layers, every
row of the ledger in a configuration of its strategy, and the catalogue's models. A program is one pair of one shape and
dtype; many trials share it, since most of the time of a comparison is compilation.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

import parity
from benchmarks.faults.__main__ import MODELS
from benchmarks.faults.planting import Model, Plan
from parity.cases import (
    ATTENTIONS,
    CONFIGURED,
    DECODER,
    ENCODER,
    FFN,
    LAYER_PATTERNS,
    MASKS,
    MHA,
    MHSA,
    MODERN,
    PAPER,
    PATTERNS,
    PRE_NORM,
    SA,
    STYLES,
    TRANSFORMER,
    Case,
    values,
)
from parity.evidence.numerics import numpy_float
from parity.frameworks import load
from parity.suite import prepared

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / part) for part in ("", "parity/weights", "parity/linen")]

from rule_strategies import ROWS, Configuration, Make, Row  # noqa: E402 - its folder is known from here on

Generator = np.random.Generator
Pair = tuple[Any, Any, tuple[Any, ...]]

# One third of the trials in half precision: its rounding is what users meet, and its noise the least like a sum of many.
DTYPES = ("float32",) * 6 + ("bfloat16", "bfloat16", "float16")
# Drawn of each row once, in the order in which hypothesis makes them.
CONFIGURATIONS = 40


@dataclass(frozen=True)
class Program:
    """A pair of one shape and dtype.

    Attributes:
        pair: its name in the counts.
        shape: what else tells it from other programs.
        dtype: of parameters and inputs.
        trial: puts random weights into both models and gives them with random arguments.
        rename: as in `parity.compare`.
    """

    pair: str
    shape: str
    dtype: str
    trial: Callable[[Generator], Pair]
    rename: dict[str, str] | None = None


def program(seed: int, number: int) -> Program:
    """One program of a run; the same for the same two numbers."""
    rng = np.random.default_rng([seed, number, 1])
    families: tuple[Callable[[Generator], Program | None], ...] = (wing, wing, row, row, row, catalogue)
    family = families[rng.integers(len(families))]
    # A configuration that torch refuses, or that leaves nothing of its inputs, is drawn again.
    return next(found for _ in range(100) if (found := family(rng)))


# ---------------------------------------------------------------- numbers


def sized(rng: Generator, low: int, high: int) -> int:
    """A size, small ones as likely as large ones."""
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))


def magnitude(rng: Generator, dtype: str, largest: float = 1e3) -> float:
    """Of weights or inputs: near one half of the time, else a thousandth to a thousand; float16 would overflow.

    Models with attention take no weights above 10: scores of 1e9 are known to float32 only up to 100, and XLA, which may
    compute them once for their maximum and once more for the exponential, then returns NaN where torch does not.
    """
    plain = dtype == "float16" or rng.random() < 0.5
    return float(2.0 ** rng.normal() if plain else 10.0 ** rng.uniform(-3, np.log10(largest)))


ATTENDING = {"bert", "gpt", "llama", "torch encoder", "vision transformer", "third document", "second document"}
ATTENDING |= {"decoder", "transformer", "linen gpt"}


def filled(model: torch.nn.Module, rng: Generator, dtype: str, largest: float = 1e3) -> torch.nn.Module:
    """Random numbers of random magnitude in every parameter and running statistic."""
    size = magnitude(rng, dtype, largest)
    with torch.no_grad():
        for path, array in model.state_dict(keep_vars=True).items():
            if not array.is_floating_point():
                continue
            fan = array[0].numel() if array.ndim > 1 else 1
            drawn = rng.standard_normal(tuple(array.shape)) * (size * 2.0 ** rng.normal(0, 0.5) * fan**-0.5)
            drawn = np.abs(drawn) + 0.05 * size if path.endswith("running_var") else drawn
            array.copy_(torch.from_numpy(np.asarray(drawn)))
    return model


def numbers(shape: tuple[int, ...], rng: Generator, dtype: str, *, rows: bool = True, largest: float = 1e3) -> np.ndarray:
    """Inputs of a random style, magnitude and offset; one time in four with a row of zeros, if `rows` says so."""
    drawn = values(shape, str(rng.choice(STYLES)), rng) * magnitude(rng, dtype, largest)
    if rows and rng.random() < 0.25 and drawn.ndim > 2:
        drawn[rng.integers(shape[0]), -1] = 0.0
    return drawn.astype(numpy_float(dtype))


# ---------------------------------------------------------------- the wings


def wing(rng: Generator) -> Program | None:
    """A layer of the two wings: attention, feed-forward network, a layer of the Transformer, or a small one."""
    module, dtype = str(rng.choice([*ATTENTIONS, FFN, ENCODER, DECODER, TRANSFORMER])), str(rng.choice(DTYPES))
    heads, width = int(rng.choice([1, 2, 3, 4, 8])), sized(rng, 2, 32)
    lengths = sized(rng, 1, 6), sized(rng, 1, 40), sized(rng, 1, 40)
    mask, mask_dtype = MASKS[rng.integers(len(MASKS))] if module in ATTENTIONS and rng.random() < 0.6 else ("", "bool")
    if module in (MHSA, SA) and mask and dtype == "float16":
        # Both sides must refuse: float16 does not hold the -1e20 that they fill in.
        dtype = "bfloat16"
    sizes: dict[str, Any] = {}
    if module == MHA:
        other = sized(rng, 1, 32)
        sizes = dict(d_model=sized(rng, 2, 256), n_heads=heads, d_q=width, d_k=width, d_v=other, bias=bool(rng.random() < 0.5))
    elif module in (MHSA, SA):
        sizes = dict(embed_size=heads * width, heads=heads)
        lengths = (lengths[0], lengths[2], lengths[2]) if module == SA else lengths
    elif module == FFN:
        sizes = dict(d_model=sized(rng, 2, 384), d_ff=sized(rng, 2, 384))
    elif module in CONFIGURED:
        kind: dict[str, Any] = (PAPER, PRE_NORM, MODERN)[rng.integers(3)]
        sizes = kind | dict(d_model=kind["n_heads"] * 2 * sized(rng, 1, 16), d_ff=sized(rng, 2, 128), max_len=48)
        sizes |= dict(n_layers=int(rng.choice([1, 2]))) if module == TRANSFORMER else {}
        mask = "ids" if module == TRANSFORMER else "n1qk"
    made = Case(module, sizes, lengths, mask, mask_dtype, dtype=dtype)
    patterns = LAYER_PATTERNS if module in (ENCODER, DECODER) else PATTERNS

    def trial(rng: Generator) -> Pair:
        case = replace(made, seed=int(rng.integers(2**31)), style=str(rng.choice(STYLES)), pattern=str(rng.choice(patterns)))
        torch_model, flax_model, args = prepared(case)
        largest = 1e3 if module == FFN else 10.0
        size = magnitude(rng, dtype, largest)
        for array in torch_model.state_dict().values():
            array.mul_(size * 2.0 ** rng.normal(0, 0.5))
        if sizes:
            parity.transfer(torch_model, flax_model, cast="source")
        size = magnitude(rng, dtype, largest)
        count = 1 if module in (FFN, ENCODER) else 2 if module == DECODER else 3
        # What comes after the values are masks.
        wanted = numpy_float(dtype)
        scaled = [a.astype(np.float64) * size if i < count and a.dtype == wanted else a for i, a in enumerate(args)]
        return torch_model, flax_model, tuple(a.astype(wanted) if a.dtype == np.float64 else a for a in scaled)

    return Program(f"wings {module}", made.name, dtype, trial)


# ---------------------------------------------------------------- rows of the ledger

# Sizes that a layer may have any number of, in torch's words and in Flax's.
WIDTHS: tuple[str, ...] = (
    "in_features",
    "out_features",
    "in_channels",
    "out_channels",
    "num_features",
    "num_channels",
    "embed_dim",
    "kdim",
    "vdim",
)
WIDTHS += ("input_size", "hidden_size", "embedding_dim", "normalized_shape")
FLAX_WIDTHS = (
    "features",
    "in_features",
    "out_features",
    "num_features",
    "in_kv_features",
    "qkv_features",
    "hidden_features",
    "group_size",
)


@cache
def configurations(number: int) -> tuple[Configuration, ...]:
    """Configurations of a row that mean the same on both sides, drawn by its own strategy."""
    found: list[Configuration] = []

    @seeded(0)
    @settings(max_examples=CONFIGURATIONS, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(ROWS[number].configurations())
    def draw(one: Configuration) -> None:
        if not one.told:
            found.append(one)

    draw()
    return tuple(found)


def row(rng: Generator) -> Program | None:
    """A layer of torch.nn beside its counterpart in NNX or Linen, as wide as a few hundred."""
    number = int(rng.integers(len(ROWS)))
    if ROWS[number].flax == "flax.nnx.WeightNorm":
        # Its scales are no parameters: in training it is another layer, and is called so.
        return None
    this, dtype, drawn = ROWS[number], str(rng.choice(DTYPES)), configurations(number)
    if "Attention" in this.cls.__name__ and dtype == "float16":
        # Flax keeps scores in float16, torch's kernel in float32: what is beyond 65504 is infinite in one of them alone.
        dtype = "bfloat16"
    largest = 10.0 if "Attention" in this.cls.__name__ else 1e3
    one = longer(this, widened(this, drawn[rng.integers(len(drawn))], sized(rng, 1, 48)), sized(rng, 1, 12))
    if "hidden_size" in one.torch and (len(one.inputs) == 1 or not one.torch.get("bias", True)):
        # Flax begins with a state, and transfer fills a bias that only Flax has, in the dtype in which the cell was made,
        # and the cell promotes to it.
        dtype = "float32"
    # At exactly zero Flax's PReLU has another gradient than torch's: a kink, and no question of rounding.
    rows = this.cls.__name__ != "PReLU"
    if this.cls.__name__ == "Embed":
        # It computes in the dtype in which its table was made.
        one = one.but(param_dtype=dtype)
    source = this.torch_layer(one).to(getattr(torch, dtype))
    inputs = tuple(x.to(getattr(torch, dtype)) if x.is_floating_point() else x for x in this.inputs(one))
    if not runs(source, inputs):
        return None
    try:
        target = this.flax_layer(one, inputs)
    except parity.InputError:
        # A state in half precision that a Linen cell would carry on in float32, which its scan refuses.
        return None

    def trial(rng: Generator) -> Pair:
        this.fitting(filled(source, rng, dtype, largest))
        args = tuple(
            numbers(shape, rng, dtype, rows=rows, largest=largest) if x.is_floating_point() else x.numpy()
            for shape, x in zip(one.inputs, inputs)
        )
        return source, parity.transfer(source, target, cast="source").value, args

    return Program(str(this), f"{one.torch} {one.flax.options} {one.inputs}", dtype, trial)


def widened(this: Row, one: Configuration, factor: int) -> Configuration:
    """The same layer with every width that many times as large."""
    several = {"LinearGeneral", "DenseGeneral", "Einsum", "WeightNorm"} & {this.cls.__name__}
    if several or one.torch.get("normalized_shape", 0).__class__ is tuple or "reduction_axes" in one.flax.options:
        return one

    def wider(value: Any, names: tuple[str, ...]) -> Any:
        if isinstance(value, Make):
            return Make(value.cls, {k: scaled(k, v, names) for k, v in value.options.items()})
        return [wider(inner, names) for inner in value] if isinstance(value, list) else value

    def scaled(name: str, value: Any, names: tuple[str, ...]) -> Any:
        return value * factor if name in names and isinstance(value, int) else wider(value, names)

    if "Conv" in this.cls.__name__:
        # Many channels in three dimensions are seconds.
        factor = min(factor, 2 if "3d" in this.rule.torch else 8)
    recurrent = "hidden_size" in one.torch
    axis = -1 if recurrent or this.family.channels is None else 1
    if one.dtype == torch.int64 or this.cls.__name__ in ("PReLU", "Dropout"):
        shapes = one.inputs
    else:
        shapes = tuple(tuple(n * factor if i == axis % len(s) else n for i, n in enumerate(s)) for s in one.inputs)
    theirs = {k: scaled(k, v, WIDTHS) for k, v in one.torch.items()}
    return replace(one, torch=theirs, flax=wider(one.flax, FLAX_WIDTHS), inputs=shapes)


def longer(this: Row, one: Configuration, factor: int) -> Configuration:
    """The same layer on that many times as many examples; a recurrent one on as many steps."""
    axis, factor = 0, min(factor, 3) if "Conv" in this.cls.__name__ else factor
    if "hidden_size" in one.torch:
        if "Cell" in this.rule.torch:
            return one
        axis, first = (1 if one.torch.get("batch_first") else 0), one.inputs[:1]
        return replace(one, inputs=(*(multiplied(s, axis, factor) for s in first), *one.inputs[1:]))
    return replace(one, inputs=tuple(multiplied(s, axis, factor) for s in one.inputs))


def multiplied(shape: tuple[int, ...], axis: int, factor: int) -> tuple[int, ...]:
    return tuple(n * factor if i == axis else n for i, n in enumerate(shape))


def runs(source: torch.nn.Module, x: tuple[torch.Tensor, ...]) -> bool:
    """Whether torch takes the configuration, and something is left of it: a kernel may be wider than its input."""
    try:
        with torch.no_grad():
            outputs = source(*x)
    except (RuntimeError, ValueError):
        return False
    return all(one.numel() for one in (outputs if isinstance(outputs, list | tuple) else [outputs]) if one is not None)


# ---------------------------------------------------------------- the catalogue's models


def catalogue(rng: Generator) -> Program:
    """A small model of the catalogue of faults, with none."""
    model: Model = MODELS[rng.integers(len(MODELS))]
    # nnx.Embed computes in the dtype in which its table was made, and says so. In half precision all steps of the wave net
    # may round to one number: of a deviation that is 0 torch's gradient is 0, and that of jnp.std NaN.
    wide = model.name in ("bert", "gpt", "llama", "wave net")
    dtype = "float32" if wide else str(rng.choice(DTYPES))
    if model.name in ATTENDING and dtype == "float16":
        # As in a row: Flax keeps scores in float16, torch's kernel in float32.
        dtype = "bfloat16"
    theirs, mine = model.make(Plan(), int(rng.integers(2**31)))
    theirs = theirs.to(getattr(torch, dtype))

    def trial(rng: Generator) -> Pair:
        largest = 10.0 if model.name in ATTENDING else 1e3
        filled(theirs, rng, dtype, largest)
        if model.ready:
            model.ready(theirs)
        # A Linen model comes back new.
        full = parity.transfer(theirs, mine, rename=model.rename, cast="source").value
        args = model.inputs(rng)
        return theirs, full, tuple(numbers(a.shape, rng, dtype, largest=largest) if a.dtype.kind == "f" else a for a in args)

    return Program(model.name, model.name, dtype, trial, model.rename)


def forget() -> None:
    """Let go of the compiled programs of pairs that are done with."""
    load("nnx").cached_functional.cache_clear()
    jax.clear_caches()


def quiet() -> None:
    """Say nothing of what torch warns of in layers that are meant so."""
    warnings.filterwarnings("ignore", message="Using padding='same' with even kernel lengths")
