"""Measure what comparing and tracing a large model costs, against running both models.

An encoder of 12 layers with 100 million parameters, PyTorch against its Flax mirror, inputs of 4 x 128. Each part runs
in a process of its own. Costs are processor seconds, which others on the machine disturb less than the clock; memory is
the peak of the process's own pages above what it held before, models and inputs included in that. Memory is measured in a
process that gives every larger array back at once: else pages that are free, but not given back, count too, and the peak of
one and the same part was seen to differ by four layers. That makes it slower, so that time is measured in others.

Running both models means, from the mildest reading to the most severe:

- `as compared`: what a trace is made of, once: torch forwards in float32 and float64, Flax forwards in float64;
- `float64`: both models forwards in float64, in which they are compared;
- `float32`: both models forwards as they are, Flax compiled once.

A comparison of all levels but that of gradients needs `all four`, those of `float64` and of `float32`; one with gradients,
for which five of its six levels take runs that have them, `all four with gradients`. Every one of these runs
includes what its first call includes, as a comparison makes it once: the compilation of the Flax model. What a process reads
once, whatever the model (the compiler of torch, as soon as a norm runs on shapes alone), stands in a row of its own.

One layer's activations are the outputs of all modules of one encoder layer in float64, an array that two modules return
counted once. `kept` is by how much the peak of a trace lies above that of the runs that it is made of.

    python benchmarks/compare_scale.py --json benchmarks/results/compare_scale.json
"""

import gc
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from measuring import MIB, Peak, resident
from rich.console import Console
from rich.table import Table

BATCH, LENGTH = 4, 128
LEVELS = ("weights", "structure", "wiring", "identical", "native", "gradients")
# The C library's threshold in bytes from which memory has pages of its own, which it otherwise raises as it goes.
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
ONCE = "torch's compiler, read once"
PARTS = ("models", "models with gradients", "trace", "isolation", "compare without gradients", "compare")


def pair(width: int, layers: int) -> tuple[Any, Any, Any]:
    """The torch encoder, its Flax mirror with the same parameters, and an input."""
    import torch
    from flax import nnx

    import jax_impl
    import parity
    import torch_impl

    sizes: dict[str, Any] = {"d_model": width, "n_heads": width // 52, "n_layers": layers, "norm_first": True, "bias": True}
    torch.manual_seed(0)
    mine = torch_impl.Encoder(torch_impl.TransformerConfig(**sizes)).eval()
    theirs = jax_impl.Encoder(jax_impl.TransformerConfig(**sizes), rngs=nnx.Rngs(0))
    theirs.eval()
    parity.transfer(mine, theirs)
    return mine, theirs, torch.randn(BATCH, LENGTH, width)


def cost(call: Callable[[], Any], start: int | None = None) -> tuple[Any, dict[str, float]]:
    """What a call returns, its processor and clock seconds, and the peak of memory above `start`, or that now, in MiB.

    Memory that was given back stays with the process, so later calls are measured from before the first.
    """
    gc.collect()
    before, cpu, clock = resident() if start is None else start, time.process_time(), time.perf_counter()
    with Peak() as peak:
        result = call()
    seconds = {"cpu": time.process_time() - cpu, "clock": time.perf_counter() - clock}
    return result, {**seconds, "peak": (peak.value - before) / MIB}


def measure(part: str, width: int, layers: int) -> dict[str, Any]:
    """The figures of one part, in this process."""
    import parity
    from parity.evidence.subject import Subject

    mine, theirs, x = pair(width, layers)
    subject = Subject(mine, theirs, (x,), {}, gradients=part != "compare without gradients")

    def torch_run(dtype: str | None, cotangents: Any = None) -> Any:
        with subject.torch.pinned():
            return subject.torch.evaluate(mine, subject.call, dtype=dtype, cotangents=cotangents)

    def flax_run(dtype: str | None, cotangents: Any = None) -> Any:
        return subject.flax.evaluate(theirs, subject.call, dtype=dtype, cotangents=cotangents, quick=dtype is not None)

    if part.startswith("models"):
        start = resident()
        native = torch_run(None)
        heads = subject.cotangents_for(native) if part != "models" else None
        found = {
            f"{side} {dtype}": cost(lambda run=run, dtype=dtype: run(None if dtype == "float32" else dtype, heads), start)[1]
            for dtype in ("float32", "float64")
            for side, run in (("torch", torch_run), ("flax", flax_run))
        }
        if part == "models":
            found["layer"] = {"MiB": layer_size(subject) / MIB}
        return {**found, "parameters": {"count": sum(p.numel() for p in mine.parameters())}}
    if part == "trace":
        trace, figures = cost(lambda: parity.trace(mine, theirs, x))
        assert trace.first_divergence() is None, trace
        return {"trace": {**figures, "steps": len(trace.steps)}}
    if part == "isolation":
        from parity.evidence.isolation import Isolator

        isolator, begun = cost(lambda: Isolator(subject))
        isolation, figures = cost(isolator.run)
        assert not isolation.faults, isolation
        return {"recording": begun, "pairs alone": {**figures, "calls": len(isolation.modules)}}
    return levels(subject)


def levels(subject: Any) -> dict[str, Any]:
    """Every level of one comparison, in order; a run that a later level uses too is counted where it is made."""
    from parity.evidence.compare import attempt, remarks

    results, found = [], {ONCE: cost(lambda: importlib.import_module("torch._dynamo"))[1]}
    for level in LEVELS if subject.gradients else LEVELS[:-1]:
        result, found[level] = cost(lambda level=level: attempt(level, subject, {}))
        assert result.status in ("passed", "not applicable"), result
        results.append(result)
    _, found["remarks"] = cost(lambda: remarks(subject, results))
    return found


def process(command: list[str], **settings: str) -> dict[str, Any]:
    """What a process prints at its end."""
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **settings}).stdout
    found: dict[str, Any] = json.loads(done.splitlines()[-1])
    return found


def layer_size(subject: Any) -> int:
    """Bytes of what the modules of one encoder layer return in float64."""
    from parity.evidence.calls import fingerprint

    with subject.torch.pinned():
        _, records = subject.torch.capture(subject.torch_model, subject.call, dtype="float64")
    inside = [r for r in records if f"{r.path}.".startswith("layers.0.")]
    return sum({fingerprint(a): a.nbytes for r in inside for a in r.outputs.values()}.values())


def ratios(parts: dict[str, Any]) -> dict[str, float]:
    """The costs of tracing and comparing, in those of running both models, and memory in layers."""
    plain, graded, found = parts["models"], parts.get("models with gradients"), {}
    runs = {
        "as compared": plain["torch float32"]["cpu"] + plain["torch float64"]["cpu"] + plain["flax float64"]["cpu"],
        "float64": plain["torch float64"]["cpu"] + plain["flax float64"]["cpu"],
        "float32": plain["torch float32"]["cpu"] + plain["flax float32"]["cpu"],
    }
    runs["all four"] = runs["float64"] + runs["float32"]
    if graded:
        for dtype in ("float64", "float32"):
            runs[f"{dtype} with gradients"] = graded[f"torch {dtype}"]["cpu"] + graded[f"flax {dtype}"]["cpu"]
        runs["all four with gradients"] = runs["float64 with gradients"] + runs["float32 with gradients"]
    costs = {name: sum(one["cpu"] for row, one in parts[name].items() if row != ONCE) for name in PARTS[2:] if name in parts}
    for name, seconds in costs.items():
        found |= {f"{name} / {run}": seconds / unit for run, unit in runs.items()}
    layer = plain["layer"]["MiB"]
    peaks = max(plain[f"{side} float64"]["peak"] for side in ("torch", "flax"))
    found |= {f"{name} kept, layers": (parts[name][key]["peak"] - peaks) / layer for name, key in KEPT if name in parts}
    return found


KEPT = (("trace", "trace"), ("isolation", "recording"))


def show(result: dict[str, Any]) -> None:
    table = Table("part", "what", "processor s", "clock s", "peak MiB")
    for part, rows in result["parts"].items():
        for name, one in rows.items():
            if "cpu" in one:
                table.add_row(part, name, f"{one['cpu']:.2f}", f"{one['clock']:.2f}", f"{one['peak']:.0f}")
    ratio = Table("ratio", "times")
    for name, value in result["ratios"].items():
        ratio.add_row(name, f"{value:.2f}")
    Console().print(table, ratio)


def main(
    layers: Annotated[int, typer.Option(help="Encoder layers.")] = 12,
    width: Annotated[int, typer.Option(help="Of the model, a multiple of 52; 832 makes 100 million parameters.")] = 832,
    repeat: Annotated[int, typer.Option(help="Processes per part for time; the fastest run of each row counts.")] = 1,
    only: Annotated[str, typer.Option(help="One part, in this process, as JSON.")] = "",
    parts: Annotated[str, typer.Option(help="Parts, with commas; those left out are taken from the file.")] = ",".join(PARTS),
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
) -> None:
    """Run every part in a process of its own, and print ratios."""
    if only:
        print(json.dumps(measure(only, width, layers)))
        return
    known = json.loads(json_file.read_text(encoding="utf-8"))["parts"] if json_file and json_file.exists() else {}
    for part in parts.split(","):
        command = [sys.executable, __file__, "--only", part, "--layers", str(layers), "--width", str(width)]
        runs, exact = [process(command) for _ in range(repeat)], process(command, **GIVEN_BACK)
        known[part] = {name: min((run[name] for run in runs), key=lambda one: one.get("cpu", 0)) for name in runs[0]}
        for name, one in exact.items():
            known[part][name] |= {"peak": one["peak"]} if "peak" in one else {}
    versions = {name: importlib.metadata.version(name) for name in ("torch", "jax", "flax", "numpy")}
    settings = {"layers": layers, "width": width, "batch": BATCH, "length": LENGTH, "machine": platform.machine(), **versions}
    result = {"settings": settings, "parts": known, "ratios": ratios(known)}
    if json_file:
        beside = json_file.with_name(json_file.name + ".new")
        beside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        beside.replace(json_file)
    show(result)


if __name__ == "__main__":
    typer.run(main)
