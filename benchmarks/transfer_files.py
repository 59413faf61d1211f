"""Measure transfers of files against what they cannot be faster than.

Each row runs in a process of its own, on files that are in the page cache: a file into an
abstract NNX model and a PyTorch module against the raw read of its bytes, file to file against
a raw copy, module to module against a warm copy of the same bytes. `extra` is the peak of the
process's memory beyond the start and beyond the arrays that it makes, mapped pages included.

    python benchmarks/transfer_files.py --mib 100 --dtype float32 --repeat 5
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

WIDTH = 1024
MIB = 2**20
ROWS = ("safetensors to NNX", "safetensors to PyTorch", "torch.save to NNX", "file to file", "file to file, transposed")
ROWS += ("module to NNX", "NNX to module")


def main(
    mib: Annotated[int, typer.Option(help="bytes of weights, in MiB")] = 100,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    repeat: Annotated[int, typer.Option(help="runs of each row; the median counts")] = 5,
    row: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Print the table, or, with --row, measure one row and print it as JSON."""
    if row:
        print(json.dumps(measured(row, Path(folder), mib, dtype, repeat)))
        return
    table = Table(title=f"{mib} MiB of {dtype} in arrays of at most {WIDTH} x {4 * WIDTH}, median of {repeat} warm runs")
    for column in ("", "seconds", "floor", "floor, seconds", "times the floor", "extra MiB", "largest array, MiB"):
        table.add_column(column, justify="left" if column in ("", "floor") else "right")
    with tempfile.TemporaryDirectory() as place:
        for name in ROWS:
            command = [sys.executable, __file__, "--row", name, "--folder", place, "--mib", str(mib), "--dtype", dtype]
            done = subprocess.run([*command, "--repeat", str(repeat)], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr}")
            found = json.loads(done.stdout.splitlines()[-1])
            ratio = found["seconds"] / found["floor"]
            numbers = (f"{found['floor']:.3f}", f"{ratio:.2f}", f"{found['extra']:.0f}", f"{found['largest']:.0f}")
            table.add_row(name, f"{found['seconds']:.3f}", found["against"], *numbers)
    Console(width=140).print(table)


def measured(row: str, folder: Path, mib: int, dtype: str, repeat: int) -> dict[str, Any]:
    """Run one row."""
    import jax
    import numpy as np
    import torch

    import parity

    torch.set_num_threads(1)
    torch_model, flax_model = models(mib, dtype)
    state, files = torch_model.state_dict(), {end: folder / f"a{end}" for end in (".safetensors", ".pt")}
    for path in files.values():
        if not path.exists():
            parity.transfer(state, path)
    size = sum(t.numel() * t.element_size() for t in state.values())
    source = {"safetensors": files[".safetensors"], "torch.save": files[".pt"], "file": files[".safetensors"]}
    chosen = source.get(row.split(maxsplit=1)[0], torch_model)
    target: Any = torch_model if row.endswith(("PyTorch", "to module")) else flax_model
    made = size if target is flax_model else 0
    if row.startswith("file to file"):
        target, made = folder / "b.safetensors", 0
        target = folder / "b.msgpack" if row.endswith("transposed") else target
    if row == "NNX to module":
        parity.transfer(torch_model, flax_model)
        chosen, made = flax_model, 0
    like = {"like": flax_model} if row.endswith("transposed") else {}
    options = {"overwrite": True, **like} if isinstance(target, Path) else {}
    seconds, extra = [], []
    for _ in range(repeat):
        begin, before = time.perf_counter(), resident()
        with Peak() as peak:
            done = parity.transfer(chosen, target, **options)
            seconds.append(time.perf_counter() - begin)
        extra.append((peak.value - before) / MIB)
        if isinstance(done.value, type(flax_model)) and row != "NNX to module":
            # The next run begins as this one did, with a model that holds nothing.
            jax.block_until_ready(jax.tree.leaves(done.value.layers[0].kernel[...]))
            del done
            _, flax_model = models(mib, dtype, flax_only=True)
            target = flax_model
    against, floor = floors(row, files[".safetensors"], folder, [t.view(torch.uint8).numpy() for t in state.values()])
    largest = max(t.numel() * t.element_size() for t in state.values()) / MIB
    return {
        "seconds": float(np.median(seconds)),
        "against": against,
        "floor": float(np.median([floor() for _ in range(repeat + 1)][1:])),
        # The first run has the arrays' memory still to come.
        "extra": extra[0] - made / MIB,
        "largest": largest,
    }


def models(mib: int, dtype: str, flax_only: bool = False) -> tuple[Any, Any]:
    """A stack of Linear layers of that size in both frameworks, the Flax one without values."""
    import jax.numpy as jnp
    import torch
    from flax import nnx

    count = max(1, round(mib * MIB / (WIDTH * WIDTH * 4 * (4 if dtype == "float32" else 2))))
    layers = [torch.nn.Linear(4 * WIDTH, WIDTH, dtype=getattr(torch, dtype)) for _ in range(0 if flax_only else count)]
    torch_model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})

    def build() -> nnx.Module:
        made = [nnx.Linear(4 * WIDTH, WIDTH, param_dtype=getattr(jnp, dtype), rngs=nnx.Rngs(0)) for _ in range(count)]
        return nnx.Dict(layers=nnx.List(made))

    return torch_model, nnx.eval_shape(build)


def floors(row: str, path: Path, folder: Path, arrays: list[Any]) -> tuple[str, Callable[[], float]]:
    """What the row cannot be faster than, and how long that takes."""
    import numpy as np

    buffers = [np.ones_like(array) for array in arrays]

    def read() -> None:
        # Into new memory, as the arrays of a model are new memory.
        path.read_bytes()

    def write() -> None:
        import os

        with (folder / "raw").open("wb") as file:
            file.write(path.read_bytes())
            os.fsync(file.fileno())

    def copy() -> None:
        for buffer, array in zip(buffers, arrays, strict=True):
            np.copyto(buffer, array)

    name, call = ("warm copy", copy) if "module" in row else ("raw read", read)
    if row.startswith("file to file"):
        name, call = "raw read and write", write

    def timed() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return name, timed


def resident() -> int:
    """The bytes of this process that are in memory, mapped pages included."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile"))) * 1024


class Peak:
    """Watch `resident` from a thread of its own."""

    def __enter__(self) -> "Peak":
        self.value, self.stop = resident(), False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        """Look about a thousand times a second."""
        while not self.stop:
            self.value = max(self.value, resident())
            time.sleep(0.001)

    def __exit__(self, *_: Any) -> None:
        self.stop = True
        self.thread.join()


if __name__ == "__main__":
    typer.run(main)
