"""Every planted fault through `parity.compare`, beside the usual practice: `python -m benchmarks.faults --help`."""

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

import parity
from benchmarks.faults import image_models, reference_models, sequence_models
from benchmarks.faults.causes import wanted
from benchmarks.faults.planting import Fault, Model, Plan
from parity.evidence.faults import FirstOperation

MODELS: tuple[Model, ...] = (*sequence_models.MODELS, *image_models.MODELS, *reference_models.MODELS)


def arrays(value: Any) -> list[np.ndarray]:
    """The arrays of an output, in order."""
    if isinstance(value, tuple | list):
        return [array for one in value for array in arrays(one)]
    return [value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)]


def refused(check: Callable[[], Any]) -> bool:
    """Whether a check of the usual practice sees a difference."""
    try:
        return check() is False
    except AssertionError:
        return True


def usual_practice(theirs: torch.nn.Module, mine: Any, args: tuple[Any, ...]) -> dict[str, bool]:
    """What the common checks of the final output say: whether each finds a fault."""
    with torch.no_grad():
        expected = arrays(theirs(*map(torch.from_numpy, args)))
    actual = arrays(mine(*args))
    if [a.shape for a in expected] != [a.shape for a in actual]:
        return dict.fromkeys(("torch.testing", "means", "1e-3"), True)
    pairs = [(torch.from_numpy(np.array(a)), torch.from_numpy(np.array(e))) for a, e in zip(actual, expected, strict=True)]
    return {
        "torch.testing": refused(lambda: [torch.testing.assert_close(a, e, equal_nan=True) for a, e in pairs]),
        "means": refused(lambda: all(np.isclose(a.mean(), e.mean(), rtol=1e-3, atol=1e-3, equal_nan=True) for a, e in pairs)),
        "1e-3": refused(lambda: all(np.allclose(a, e, rtol=1e-3, atol=1e-3, equal_nan=True) for a, e in pairs)),
    }


def tried(model: Model, fault: Fault | None, seed: int) -> dict[str, Any]:
    """One fault, or none: what is found, where, and as what."""
    args = model.inputs(np.random.default_rng(seed))
    theirs, mine = model.make(Plan(fault), seed)
    began = time.perf_counter()
    report = parity.compare(theirs, mine, *map(torch.from_numpy, args), rename=model.rename, seed=seed)
    seconds = time.perf_counter() - began
    found = report.diagnosis
    modules = sorted({one.path for one in found.isolation.faults}) if found else []
    causes = [cause.hypothesis for cause in found.causes_of(fault.place)] if found and fault else []
    row = {
        "model": model.name,
        "place": fault.place if fault else None,
        "kind": fault.kind if fault else None,
        "found": not report.passed,
        "levels": [level.level for level in report.levels if level.status == "failed"],
        "modules": modules,
        "causes": causes,
        "seconds": round(seconds, 2),
        "settings": list(found.settings) if found else [],
    }
    if fault:
        by_setting = any(sentence.partition(":")[0] == fault.place for sentence in row["settings"])
        everywhere = fault.kind == "weights not loaded"
        row["exact"] = modules == [fault.place] or (not modules and by_setting) or everywhere
        row["operation"] = bool(found and any(o.path == fault.place and named(o.operation) for o in found.isolation.faults))
        row["cause"] = bool(causes and causes[0] in wanted(fault.kind)) or (not modules and by_setting)
        row |= usual_practice(theirs, mine, args)
    return row


def named(operation: FirstOperation | None) -> bool:
    """Whether an operation is named on both sides."""
    return operation is not None and operation.torch is not None and operation.flax is not None


def table(rows: list[dict[str, Any]]) -> str:
    """The share of faults that each way finds, and how well they are named."""
    faults = [row for row in rows if row["kind"]]
    count = max(1, len(faults))
    lines = [f"{len(faults)} faults in {len({row['model'] for row in faults})} models"]
    for name, key in (
        ("found", "found"),
        ("module named exactly", "exact"),
        ("op named", "operation"),
        ("cause ranked first", "cause"),
        ("torch.testing.assert_close on the outputs", "torch.testing"),
        ("outputs within 1e-3", "1e-3"),
        ("means of the outputs within 1e-3", "means"),
    ):
        share = sum(bool(row[key]) for row in faults)
        lines.append(f"  {name:<44} {share:>4}  {100 * share / count:5.1f} %")
    clean = [row for row in rows if not row["kind"]]
    lines.append(f"{len(clean)} clean pairs: {sum(row['found'] for row in clean)} false alarms")
    return "\n".join(lines)


def main() -> None:
    """Run the catalogue and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="the models whose names contain this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        if options.only not in model.name:
            continue
        for fault in (None, *model.catalogue()):
            row = tried(model, fault, options.seed)
            rows.append(row)
            words = "clean" if fault is None else f"{fault}"
            marks = " ".join(key for key in ("found", "exact", "operation", "cause") if row.get(key))
            print(
                f"{model.name:<20} {words:<64} {marks:<28} {row['seconds']:6.1f} s  {', '.join(row['causes'][:2])}", flush=True
            )
        jax.clear_caches()
    print(table(rows))
    if options.out:
        facts = {"torch": torch.__version__, "jax": jax.__version__, "python": platform.python_version(), "seed": options.seed}
        temporary = options.out.with_suffix(".part")
        temporary.write_text(json.dumps({"versions": facts, "rows": rows}, indent=1))
        temporary.replace(options.out)


if __name__ == "__main__":
    main()
