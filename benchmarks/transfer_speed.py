"""Measure transfers against what they cannot be faster than, and against the converter of transformers 4.

A BERT of some 390 arrays, 1.2 GB in float32, travels between PyTorch, Flax and files. Each row runs in a process
of its own; its floor, a copy or a read of the same bytes by one core, is measured beside it. `first` is the run
with which the process begins, into memory that is new to it; `times` the fastest of the later ones over the
fastest of the floor's, which others on the machine disturb least. `extra` is the peak of the first run's memory
beyond the start and beyond the arrays that it makes, mapped pages included. `wanted` is what must hold of `times`;
the peak must not be above two of the largest array, or one where nothing is made.

    python benchmarks/transfer_speed.py --json benchmarks/results/transfer_speed.json

The converter runs in an environment of its own, made with pip in a temporary folder; --converter-python names one
that exists, --no-converter leaves those rows out.
"""

import contextlib
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import measuring
import typer
from measuring import MIB, POSITIONS, TYPES, VOCABULARY, WIDTH
from rich.console import Console
from rich.table import Table

CONVERTER = ("transformers<5", "torch", "jax", "flax", "safetensors")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what travels, and how.
        floor: what it is measured against.
        wanted: the most times the floor, by dtype; empty where nothing is wanted.
        arrays: the most memory beyond the arrays that are made, in arrays of the largest size; None for any.
        converter: its name in converter_speed.py, for a row of the other environment.
    """

    name: str
    floor: str
    wanted: tuple[float, ...] = ()
    arrays: float | None = None
    converter: str = ""


DTYPES = ("float32", "bfloat16")
# Bytes of a process's memory that are nobody's arrays: stacks of threads, modules that are imported on the way.
OWN = 4 * MIB
ROWS = (
    Row("module to NNX", "warm copy", (3.5, 8.0), 2),
    Row("module to NNX, transformers 4", "warm copy", converter="memory"),
    Row("NNX to module in place", "warm copy", (4.5, 8.0), 1),
    Row("NNX to module, transformers 4", "warm copy", converter="back"),
    Row("module to NNX, copy=False", "warm copy", (0.3, 0.6), 1),
    Row("plan alone", "warm copy"),
    Row("parity.empty", "warm copy"),
    Row("nnx.eval_shape", "warm copy"),
    Row("initialisation", "warm copy"),
    Row("safetensors to NNX", "raw read", (2.5, 2.5), 2),
    Row("safetensors to NNX, transformers 4", "raw read", converter="file"),
    Row("the same with its random model", "raw read", converter="whole"),
    Row("safetensors to module", "raw read", (), 2),
    Row("torch.save to NNX", "raw read", (), 2),
    Row("file to file", "raw read and write", (), 2),
    Row("file to file, transposed", "raw read and write", (), 2),
)


def main(
    layers: Annotated[int, typer.Option(help="layers of the model; 24 are 1.2 GB in float32")] = 24,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or both")] = "both",
    repeat: Annotated[int, typer.Option(help="runs of each row after the first")] = 5,
    only: Annotated[str, typer.Option(help="rows whose name holds this")] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write what was measured")] = None,
    converter: Annotated[bool, typer.Option(help="also run the converter of transformers 4")] = True,
    converter_python: Annotated[Path | None, typer.Option(help="Python of an environment with transformers 4")] = None,
    row: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[Path, typer.Option(hidden=True)] = Path(),
) -> None:
    """Print a table for each dtype, or, with --row, measure one row and print it as JSON."""
    if row:
        print(json.dumps(measure(row, folder, layers, dtype, repeat)))
        return
    rows = [one for one in ROWS if only in one.name and (converter or not one.converter)]
    found: dict[str, Any] = {"machine": machine(), "versions": versions(), "layers": layers, "repeat": repeat, "rows": {}}
    if json_path and json_path.exists() and only:
        # Rows that are not run again stay as they are.
        found["rows"] = json.loads(json_path.read_text(encoding="utf-8"))["rows"]
    with contextlib.ExitStack() as stack:
        if converter_python is None and any(one.converter for one in rows):
            converter_python = environment(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        for one_dtype in DTYPES if dtype == "both" else (dtype,):
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (place / "config.json").write_text(json.dumps(measuring.config(layers)), encoding="utf-8")
            asked = ["--folder", str(place), "--layers", str(layers), "--dtype", one_dtype, "--repeat", str(repeat)]
            size, largest = run([sys.executable, __file__, "--row", "prepare", *asked])["sizes"]
            results = {}
            kept = found["rows"].setdefault(one_dtype, {})
            kept |= {"MiB": round(size / MIB), "largest MiB": round(largest / MIB, 1)}
            for one in rows:
                mine = [sys.executable, __file__, "--row", one.name, *asked]
                other = [str(converter_python), str(Path(__file__).with_name("converter_speed.py")), one.converter, str(place)]
                results[one.name] = result(one, run([*other, str(repeat)] if one.converter else mine), one_dtype, size, largest)
                kept[one.name] = results[one.name]
                if json_path:
                    json_path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
            show(results, f"{size / MIB:,.0f} MiB of {one_dtype}, the largest array {largest / MIB:.1f} MiB")


def run(command: list[str]) -> dict[str, Any]:
    """What a process prints as JSON in its last line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def environment(place: Path) -> Path:
    """The Python of a new environment with transformers 4."""
    venv.create(place, with_pip=True)
    python = place / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *CONVERTER], check=True)
    return python


def result(row: Row, found: dict[str, Any], dtype: str, size: int, largest: int) -> dict[str, Any]:
    """A row's numbers as they are printed and kept."""
    # The converter always makes new arrays, and so does what ends in NNX, except for an empty model.
    made = size if found.get("makes", bool(row.converter) and row.converter != "back") else 0
    times = min(found["seconds"]) / found["floor"]
    extra = found["peak"] - made
    wanted = row.wanted[DTYPES.index(dtype)] if row.wanted else None
    holds = (wanted is None or times <= wanted) and (row.arrays is None or extra <= row.arrays * largest + OWN)
    return {
        "seconds": round(min(found["seconds"]), 4),
        "median seconds": round(statistics.median(found["seconds"]), 4),
        "first seconds": round(found["first"], 4),
        "floor": row.floor,
        "floor seconds": round(found["floor"], 4),
        "times": round(times, 2),
        **({"reading again into the same memory, seconds": round(found["reread"], 4)} if "reread" in found else {}),
        "wanted times": wanted,
        "extra MiB": round(extra / MIB),
        "wanted extra arrays": row.arrays,
        "holds": holds if wanted is not None or row.arrays is not None else None,
        **{key: found[key] for key in ("shared", "leaves", "versions") if key in found},
    }


def show(results: dict[str, Any], title: str) -> None:
    """The table."""
    table = Table(title=title)
    columns = ("", "seconds", "first", "floor", "seconds", "times", "wanted", "extra MiB", "leaves that share memory")
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "floor") else "right")
    for name, one in results.items():
        wanted = "" if one["wanted times"] is None else f"<= {one['wanted times']}"
        shared = f"{one['shared']} of {one['leaves']}" if "shared" in one else ""
        numbers = (f"{one['seconds']:.3f}", f"{one['first seconds']:.3f}", one["floor"], f"{one['floor seconds']:.3f}")
        missed = "" if one["holds"] is not False else " missed"
        table.add_row(name, *numbers, f"{one['times']:.2f}{missed}", wanted, str(one["extra MiB"]), shared)
    Console(width=150).print(table)


def machine() -> dict[str, Any]:
    """What the numbers depend on: the processor's model and how many of it there are."""
    import os

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {"processor": model, "cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version()}


def versions() -> dict[str, str]:
    """Of the packages that the rows use."""
    return {name: importlib.metadata.version(name) for name in ("torch", "jax", "jaxlib", "flax", "numpy", "ml-dtypes")}


# ---------------------------------------------------------------- models


def arrays() -> dict[str, tuple[str, tuple[int, ...]]]:
    """The layers around a stack: the kind and the sizes of each."""
    inside = "embeddings"
    return {
        f"{inside}.word_embeddings": ("embed", (VOCABULARY, WIDTH)),
        f"{inside}.position_embeddings": ("embed", (POSITIONS, WIDTH)),
        f"{inside}.token_type_embeddings": ("embed", (TYPES, WIDTH)),
        f"{inside}.LayerNorm": ("norm", (WIDTH,)),
        "pooler.dense": ("linear", (WIDTH, WIDTH)),
    }


def layer() -> dict[str, tuple[str, tuple[int, ...]]]:
    """The layers of one block."""
    square = ("linear", (WIDTH, WIDTH))
    return {
        **{f"attention.self.{name}": square for name in ("query", "key", "value")},
        "attention.output.dense": square,
        "attention.output.LayerNorm": ("norm", (WIDTH,)),
        "intermediate.dense": ("linear", (WIDTH, 4 * WIDTH)),
        "output.dense": ("linear", (4 * WIDTH, WIDTH)),
        "output.LayerNorm": ("norm", (WIDTH,)),
    }


def tree(layers: int, make: Callable[[str, tuple[int, ...]], Any], branch: Callable[[dict[str, Any]], Any]) -> Any:
    """A model with the names of transformers' BertModel, of layers and containers of one framework."""
    found: dict[str, Any] = {}
    blocks = {f"encoder.layer.{i}.{name}": spec for i in range(layers) for name, spec in layer().items()}
    for path, (kind, sizes) in (arrays() | blocks).items():
        *above, last = path.split(".")
        node = found
        for name in above:
            node = node.setdefault(name, {})
        node[last] = make(kind, sizes)

    def joined(node: Any) -> Any:
        return branch({name: joined(child) for name, child in node.items()}) if isinstance(node, dict) else node

    return joined(found)


def torch_model(layers: int, dtype: str) -> Any:
    """The model in PyTorch."""
    import torch

    chosen = getattr(torch, dtype)

    def make(kind: str, sizes: tuple[int, ...]) -> Any:
        if kind == "norm":
            return torch.nn.LayerNorm(sizes, eps=1e-12, dtype=chosen)
        return {"embed": torch.nn.Embedding, "linear": torch.nn.Linear}[kind](*sizes, dtype=chosen)

    return tree(layers, make, torch.nn.ModuleDict)


def flax_model(layers: int, dtype: str, rngs: Any) -> Any:
    """The model in Flax."""
    import jax.numpy as jnp
    from flax import nnx

    chosen = {"param_dtype": getattr(jnp, dtype), "rngs": rngs}

    def make(kind: str, sizes: tuple[int, ...]) -> Any:
        if kind == "norm":
            return nnx.LayerNorm(*sizes, epsilon=1e-12, use_fast_variance=False, **chosen)
        return {"embed": nnx.Embed, "linear": nnx.Linear}[kind](*sizes, **chosen)

    def branch(children: dict[str, Any]) -> Any:
        return nnx.List(list(children.values())) if all(map(str.isdigit, children)) else nnx.Dict(children)

    return tree(layers, make, branch)


# ---------------------------------------------------------------- rows


def measure(row: str, folder: Path, layers: int, dtype: str, repeat: int) -> dict[str, Any]:
    """Run one row of this environment."""
    import torch

    import parity

    torch.set_num_threads(1)
    file = folder / "model.safetensors"
    if row == "prepare":
        state = torch_model(layers, dtype).state_dict()
        parity.transfer(state, file)
        parity.transfer(state, folder / "model.pt")
        sizes = [tensor.numel() * tensor.element_size() for tensor in state.values()]
        return {"sizes": [sum(sizes), max(sizes)]}
    return (from_file if "file" in row or row.startswith(("safe", "torch.save")) else in_memory)(
        row, folder, layers, dtype, repeat
    )


def empty(layers: int, dtype: str) -> Any:
    """The Flax model without values."""
    import parity

    return parity.empty(flax_model, layers, dtype)


def from_file(row: str, folder: Path, layers: int, dtype: str, repeat: int) -> dict[str, Any]:
    """Run a row that reads a file."""
    import parity

    source = folder / ("model.pt" if row.startswith("torch.save") else "model.safetensors")
    target: list[Any] = [None]
    options: dict[str, Any] = {}

    def renew() -> None:
        if row.endswith("NNX"):
            target[0] = empty(layers, dtype)

    renew()
    if row.endswith("module"):
        target[0] = torch_model(layers, dtype)
    if row.startswith("file"):
        target[0], options = folder / "written.safetensors", {"overwrite": True}
    if row.endswith("transposed"):
        target[0], options = folder / "written.msgpack", {"overwrite": True, "like": empty(layers, dtype)}
    found = measuring.measured(lambda: parity.transfer(source, target[0], **options), repeat, renew)
    if row.startswith("file"):
        target[0].unlink()
        floor = measuring.write_floor(source, folder / "copied", repeat)
    else:
        floor = measuring.read_floor(source, repeat)
        found["reread"] = measuring.reread_floor(source, repeat)
    return found | {"floor": floor, "makes": row.endswith("NNX")}


def in_memory(row: str, folder: Path, layers: int, dtype: str, repeat: int) -> dict[str, Any]:
    """Run a row between models."""
    import jax
    import torch
    from flax import nnx

    import parity

    source = torch_model(layers, dtype)
    state = source.state_dict()
    floor = measuring.copy_floor([tensor.view(torch.uint8).numpy() for tensor in state.values()], repeat)
    filled = [empty(layers, dtype)]

    def renew() -> None:
        filled[0] = empty(layers, dtype)

    def keep() -> None:
        pass

    calls: dict[str, tuple[Callable[[], Any], Callable[[], None]]] = {
        "module to NNX": (lambda: parity.transfer(source, filled[0]), renew),
        "module to NNX, copy=False": (lambda: parity.transfer(source, filled[0], copy=False), renew),
        "NNX to module in place": (lambda: parity.transfer(filled[0], source), keep),
        "plan alone": (lambda: parity.transfer(source, filled[0], dry=True), keep),
        "parity.empty": (lambda: empty(layers, dtype), keep),
        "nnx.eval_shape": (lambda: nnx.eval_shape(lambda: flax_model(layers, dtype, nnx.Rngs(0))), keep),
        "initialisation": (
            lambda: jax.block_until_ready(nnx.state(flax_model(layers, dtype, nnx.Rngs(0)), nnx.Param)),
            keep,
        ),
    }
    if row == "NNX to module in place":
        parity.transfer(source, filled[0])
    call, again = calls[row]
    # A user pays for compiling the initialisers, which is the first run.
    found = measuring.measured(call, 1 if row == "initialisation" else repeat, again)
    found |= {"floor": floor, "makes": row in ("module to NNX", "initialisation")}
    return found | (shared(source, filled[0]) if row.startswith(("module", "NNX to")) else {})


def shared(torch_side: Any, flax_side: Any) -> dict[str, int]:
    """How many leaves of the Flax model change when the torch model is written into."""
    import jax
    import torch
    from flax import nnx

    # np.asarray would keep a copy of a transposed array from its first reading.
    leaves = [torch.from_dlpack(leaf) for leaf in jax.tree.leaves(nnx.state(flax_side, nnx.Param))]
    before = [float(leaf.flatten()[0]) for leaf in leaves]
    with torch.no_grad():
        for tensor in torch_side.state_dict().values():
            tensor.add_(77)
    changed = sum(float(leaf.flatten()[0]) != old for leaf, old in zip(leaves, before, strict=True))
    return {"shared": changed, "leaves": len(leaves)}


if __name__ == "__main__":
    typer.run(main)
