"""Measure the constants of the level `native` for each dtype.

Runs clean pairs of the two wings on random parameters, inputs and masks, and the same pairs
with a fault planted in the Flax side that loses precision. Prints, for each dtype, the largest
error over the allowed one among clean trials (must stay below 1, with room), and the share of
faults that the rule finds.

    python benchmarks/calibrate_native.py --trials 200
"""

import importlib
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from parity.cases import FFN, MHA, MHSA, SA, SDPA, STYLES, Case
from parity.evidence.numerics import PRECISION_RULE, UNIT, finite_scale, precision, rms, wide
from parity.evidence.subject import Subject
from parity.frameworks import load
from parity.suite import prepared


def narrow_sums(a: Any, b: Any) -> Any:
    """A product whose terms are summed in the operands' own dtype."""
    total = jnp.zeros((*jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), a.dtype)
    for k in range(a.shape[-1]):
        total = rounded(total + rounded(a[..., k : k + 1] * b[..., k : k + 1, :]))
    return total


def rounded(x: Any) -> Any:
    """Keep XLA from carrying more digits than the dtype has."""
    info = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def cut_matmul(a: Any, b: Any) -> Any:
    """A product whose operands keep 10 bits (7 where the dtype has no more), as on tensor cores."""
    return jnp.matmul(shortened(a), shortened(b)).astype(a.dtype)


def shortened(x: Any) -> Any:
    mantissa = {jnp.dtype("float32"): 10, jnp.dtype("float16"): 7, jnp.dtype("bfloat16"): 5}[x.dtype]
    return jax.lax.reduce_precision(x, exponent_bits=8 if x.dtype != jnp.float16 else 5, mantissa_bits=mantissa)


# By import: the package calls a function of its own like the module that holds it.
MODULES = tuple(
    importlib.import_module(f"jax_impl.{name}")
    for name in ("scaled_dot_product_attention", "multi_head_self_attention", "self_attention")
)
# Name in the wing, and what stands in its place.
FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "sums kept in the dtype": ("matmul", narrow_sums),
    "products of shortened operands": ("matmul", cut_matmul),
}


@contextmanager
def planted(name: str, faulty: Callable[..., Any]) -> Any:
    """Put a fault into every module of the wing that uses the operation."""
    users = [module for module in MODULES if hasattr(module, name)]
    originals = [getattr(module, name) for module in users]
    # A program that was compiled for the clean module must not be found again.
    load("nnx").cached_functional.cache_clear()
    try:
        for module in users:
            setattr(module, name, faulty)
        yield users
    finally:
        for module, original in zip(users, originals, strict=True):
            setattr(module, name, original)
        load("nnx").cached_functional.cache_clear()


def trial(case: Case) -> tuple[float, float, float, float]:
    """Over all outputs, the worst place and the root mean square: error over the allowed, then the factor needed."""
    torch_model, flax_model, args = prepared(case)
    subject = Subject(torch_model, flax_model, args, {}, seed=case.seed, gradients=False)
    _, floor_max, _, floor_rms = PRECISION_RULE[case.dtype]
    found = np.zeros(4)
    for path, oracle in subject.torch_wide.outputs.items():
        with np.errstate(invalid="ignore"):
            runs = [wide(run.outputs[path]) - wide(oracle) for run in subject.ensemble]
        mine, unit = subject.flax_native.outputs[path], UNIT[case.dtype] * finite_scale(oracle)
        rule = precision(mine, [run.outputs[path] for run in subject.ensemble], wide(oracle), case.dtype)
        error = wide(mine) - wide(oracle)
        with np.errstate(invalid="ignore"):
            need_max = (np.abs(error).max() - floor_max * unit) / max(np.abs(run).max() for run in runs)
            need_rms = (rms(error) - floor_rms * unit) / max(rms(run) for run in runs)
        # A float16 sum that overflows on both sides has no error to compare.
        found = np.fmax(found, [rule.max_ratio, rule.rms_ratio, need_max, need_rms])
    return tuple(map(float, found))


# Long sums, so that losing digits in them can show; the last two show nothing of attention.
LONG = (
    Case(SDPA, {}, (2, 5, 40)),
    Case(MHA, {"d_model": 24, "n_heads": 3, "d_q": 8, "d_k": 8, "d_v": 5, "bias": True}, (2, 5, 40)),
    Case(MHSA, {"embed_size": 24, "heads": 3}, (2, 5, 40)),
    Case(FFN, {"d_model": 24, "d_ff": 40}),
    Case(SA, {"embed_size": 24, "heads": 3}, (2, 5, 40)),
)


def cases(dtype: str, trials: int, seed: int, programs: tuple[Case, ...] = LONG) -> list[Case]:
    count = len(programs)
    return [
        replace(programs[i % count], dtype=dtype, seed=seed + i, style=STYLES[(i // count) % len(STYLES)])
        for i in range(trials)
    ]


def main(
    trials: Annotated[int, typer.Option(help="clean trials for each dtype")] = 300,
    seed: Annotated[int, typer.Option(help="of parameters and inputs")] = 1000,
) -> None:
    """Print the table."""
    columns = ("dtype", "trials", "false alarms", "largest max", "largest rms", "factor max", "factor rms")
    table = Table(*columns, *(f"found: {name}" for name in FAULTS))
    for dtype in PRECISION_RULE:
        if dtype == "float64":
            continue
        clean = np.array([trial(case) for case in cases(dtype, trials, seed)])
        found = []
        for operation, faulty in FAULTS.values():
            with planted(operation, faulty):
                hits = [max(trial(case)[:2]) > 1 for case in cases(dtype, max(24, trials // 4), seed, LONG[:3])]
            found.append(f"{100 * np.mean(hits):.0f} %")
        false = int((clean[:, :2].max(axis=1) > 1).sum())
        table.add_row(dtype, str(trials), str(false), *(f"{worst:.2f}" for worst in clean.max(axis=0)), *found)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
