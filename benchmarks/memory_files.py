"""Measure the memory that a transfer from file to file takes, for each kind of source and target.

Each row runs in a process of its own. `extra` is the peak of that process's memory beyond its start, mapped
pages included; what it may take is two of the largest arrays and a few MiB that a library takes at its first call.

    python benchmarks/memory_files.py --mib 256 --largest 16
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from transfer_files import MIB, Peak, resident

TORCH = (".safetensors", "-shards", ".pt", ".bin.index.json")
FLAX = (".msgpack", ".orbax", ".flax.safetensors")


def main(
    mib: Annotated[int, typer.Option(help="bytes of weights, in MiB")] = 256,
    largest: Annotated[int, typer.Option(help="bytes of each array, in MiB")] = 16,
    only: Annotated[str, typer.Option(help="only rows with this kind, such as .orbax")] = "",
    row: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Print the table, or, with --row, measure one row and print it as JSON."""
    if row:
        print(json.dumps(measured(*row.split(">"), Path(folder))))
        return
    table = Table(title=f"{mib} MiB in float32 arrays of {largest} MiB, from file to file")
    for column in ("from", "to", "seconds", "extra MiB", "largest arrays"):
        table.add_column(column, justify="left" if column in ("from", "to") else "right")
    with tempfile.TemporaryDirectory() as place:
        make(Path(place), mib, largest)
        rows = [(source, target) for group in (TORCH, FLAX) for source in group for target in group]
        for source, target in [*rows, (".pt", ".orbax"), (".orbax", ".pt")]:
            if only and only not in (source, target):
                continue
            command = [sys.executable, __file__, "--row", f"{source}>{target}", "--folder", place]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{source} to {target} failed:\n{done.stderr}")
            found = json.loads(done.stdout.splitlines()[-1])
            extra = found["extra"] / MIB
            table.add_row(source, target, f"{found['seconds']:.2f}", f"{extra:.0f}", f"{extra / largest:.1f}")
    Console(width=100).print(table)


def make(folder: Path, mib: int, largest: int) -> None:
    """Write the sources, each kind from the one before."""
    import numpy as np

    import parity
    from parity.weights.files import Slot
    from parity.weights.msgpack_file import write

    shape, array = (1024, largest * MIB // 4096), np.zeros((1024, largest * MIB // 4096), np.float32)
    for side, name in (("torch", "weight"), ("flax", "kernel")):
        names = [f"layers.{i}.{name}" for i in range(max(1, mib // largest))]
        kinds, start = (TORCH, ".pt") if side == "torch" else (FLAX, ".msgpack")
        if side == "flax":
            write(folder / "a.msgpack", [Slot((n,), shape, "float32") for n in names], dict.fromkeys(names, array), {})
        else:
            import torch

            torch.save({n: torch.zeros(shape[::-1]) for n in names}, folder / "a.pt")
        for end in kinds:
            if end != start:
                parity.transfer(folder / f"a{start}", folder / f"a{end}")


def measured(source: str, target: str, folder: Path) -> dict[str, float]:
    """Run one row."""
    import time

    import parity
    from parity.frameworks import load

    # The frameworks themselves are no part of what a transfer takes.
    for end in (source, target):
        if end in (".pt", ".bin.index.json", ".orbax"):
            load("nnx.orbax" if end == ".orbax" else "torch.files")
    across = (source in TORCH) != (target in TORCH)
    like = {"like": folder / ("a.msgpack" if target in FLAX else "a.pt")} if across else {}
    (folder / "out").mkdir(exist_ok=True)
    before, begin = resident(), time.perf_counter()
    with Peak() as peak:
        parity.transfer(folder / f"a{source}", folder / "out" / f"b{target}", overwrite=True, **like)
    return {"seconds": time.perf_counter() - begin, "extra": peak.value - before}


if __name__ == "__main__":
    typer.run(main)
