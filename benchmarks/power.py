"""The smallest change of a weight that each level finds: what the allowance for rounding costs.

    python -m benchmarks.power --out benchmarks/results/power.json

The largest number of one weight of the Flax model is multiplied by 1 + e, with e a power of two from one unit in the
last place up. For each level the smallest e is told from which on it fails, the median over several sets of numbers;
`native` and `native gradients` compare in float32, the others in float64.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from flax import nnx
from rich.console import Console
from rich.table import Table
from torch import nn

import parity
from benchmarks.clean_trials import versions, write_record
from parity.cases import MHA, Case
from parity.evidence import ladder
from parity.evidence.numerics import wide
from parity.evidence.subject import Subject
from parity.evidence.trace import trace_subject
from parity.suite import models

LEVELS = ("weights", "identical", "gradients", "trace", "native", "native gradients")
SIZES = [2.0**-k for k in range(23, 0, -1)]


@dataclass(frozen=True)
class Layer:
    """A pair whose Flax side is changed.

    Attributes:
        name: of the layer.
        make: the pair.
        weight: path of the weight that is changed, in the Flax model.
        inputs: shapes.
    """

    name: str
    make: Callable[[], tuple[nn.Module, nnx.Module]]
    weight: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...]


class TorchImage(nn.Module):
    """A convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Channels first."""
        return self.conv(x)


class Image(nnx.Module):
    """Its port."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(8, 16, (3, 3), padding=1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Channels first."""
        return self.conv(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


class TorchCell(nn.Module):
    """One step of a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(32, 32, bias=False)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """Input, then state."""
        return self.cell(x, h)


class Cell(nnx.Module):
    """Its port."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.cell = nnx.GRUCell(32, 32, rngs=rngs)

    def __call__(self, x: Any, h: Any) -> Any:
        """Input, then state."""
        return self.cell(h, x)[0]


def attention() -> tuple[nn.Module, nnx.Module]:
    """The wings' attention of several heads."""
    case = Case(MHA, dict(d_model=64, n_heads=4, d_q=16, d_k=16, d_v=16, bias=True))
    return models(case.module, tuple(case.sizes.items()), "cpu")


def norm(rngs: nnx.Rngs) -> nnx.Module:
    """Flax's own layer as torch computes it."""
    return nnx.LayerNorm(64, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


TOKENS = (4, 16, 64)
LAYERS = (
    Layer("Linear", lambda: (nn.Linear(64, 64), nnx.Linear(64, 64, rngs=nnx.Rngs(0))), ("kernel",), (TOKENS,)),
    Layer("LayerNorm", lambda: (nn.LayerNorm(64), norm(nnx.Rngs(0))), ("scale",), (TOKENS,)),
    Layer("Conv2d", lambda: (TorchImage(), Image(rngs=nnx.Rngs(0))), ("conv", "kernel"), ((2, 8, 12, 10),)),
    Layer("GRUCell", lambda: (TorchCell(), Cell(rngs=nnx.Rngs(0))), ("cell", "dense_i", "kernel"), ((8, 32), (8, 32))),
    Layer("MultiHeadAttention", attention, ("W_v", "kernel"), (TOKENS, TOKENS, TOKENS)),
)


def subject_of(pair: tuple[nn.Module, nnx.Module], args: tuple[np.ndarray, ...], known: dict[str, Any]) -> Subject:
    """A comparison that takes over what torch has been run for: only the Flax model changes."""
    subject = Subject(*pair, args, {}, pins_checked=True)
    vars(subject).update({name: value for name, value in known.items() if name.startswith(KEPT)})
    return subject


KEPT = ("torch_native", "torch_wide", "ensemble", "shaken", "elementary", "kinks", "cotangents")


def found(subject: Subject) -> set[str]:
    """The levels that fail."""
    failed = {name for name in ("weights", "identical") if ladder.CLIMB[name](subject).status == "failed"}
    failed |= {"native"} if ladder.native(subject, modes=("compiled",)).status == "failed" else set()
    failed |= {"gradients"} if ladder.gradients(subject).status == "failed" else set()
    # The level compares those only where float64 finds nothing.
    scales = ladder.gradient_scales(subject)
    for path, _, oracle, actual in ladder.paired_gradients(subject)[1]:
        if actual is not None and ladder.imprecise(subject, "", "gradients", path, actual, wide(oracle), scales[path])[0]:
            failed |= {"native gradients"}
    return failed | (set() if trace_subject(subject).passed else {"trace"})


def smallest(layer: Layer, seed: int) -> dict[str, float]:
    """For each level the size from which on every change is found; infinite if none is."""
    rng = np.random.default_rng([seed, len(layer.name)])
    theirs, mine = layer.make()
    theirs.eval()
    mine.eval()
    with torch.no_grad():
        for array in theirs.parameters():
            scale = array[0].numel() ** -0.5 if array.ndim > 1 else 1.0
            array.copy_(torch.from_numpy(rng.standard_normal(tuple(array.shape)) * scale))
    parity.transfer(theirs, mine)
    args = tuple(rng.standard_normal(shape).astype(np.float32) for shape in layer.inputs)
    variable: Any = mine
    for name in layer.weight:
        variable = getattr(variable, name)
    clean = np.array(variable[...])
    at = np.unravel_index(np.abs(clean).argmax(), clean.shape)
    known: dict[str, Any] = {}
    sizes = dict.fromkeys(LEVELS, float("inf"))
    for size in reversed(SIZES):
        wrong = clean.copy()
        wrong[at] *= np.float32(1 + size)
        variable[...] = wrong
        subject = subject_of((theirs, mine), args, known)
        levels = found(subject)
        known = vars(subject)
        for level in LEVELS:
            # From large to small, as long as it is found.
            if level in levels and sizes[level] in (2 * size, float("inf")):
                sizes[level] = size
    variable[...] = clean
    return sizes


def main(
    seeds: Annotated[int, typer.Option(help="sets of numbers for each layer")] = 3,
    out: Annotated[Path | None, typer.Option(help="a JSON file")] = None,
) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    table, rows = Table("layer", *LEVELS), {}
    for layer in LAYERS:
        each = [smallest(layer, seed) for seed in range(seeds)]
        rows[layer.name] = {level: statistics.median(one[level] for one in each) for level in LEVELS}
        table.add_row(layer.name, *(f"{rows[layer.name][level]:.1e}" for level in LEVELS))
    Console(width=110).print(table)
    if out:
        write_record(out, {"command": "python -m benchmarks.power", "versions": versions(), "seeds": seeds, "smallest": rows})


if __name__ == "__main__":
    typer.run(main)
