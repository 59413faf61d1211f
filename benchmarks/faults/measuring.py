"""One planted fault, or none, through `parity.compare` and through the usual practice."""

import hashlib
import platform
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import torch

import parity
from benchmarks.faults.causes import wanted
from benchmarks.faults.planting import Fault, Model, Plan
from parity.errors import InputError
from parity.evidence.faults import Diagnosis

Row = dict[str, Any]
UNLOADED = "weights not loaded"
FIRST = ("weights", "structure", "wiring", "identical")


def measured(model: Model, fault: Fault | None, seed: int) -> Row:
    """What `parity.compare` says of a pair with one fault, or none: whether it is found, where, and as what.

    Args:
        model: the pair.
        fault: that is planted in its Flax model.
        seed: of weights, inputs and probes.

    Returns:
        Plain data, see `benchmarks/results/faults.json`: `found`; `exact`, whether that module and no other
        is named; `cause`, whether the right cause is ranked first there; `operation`, the operation that
        is named, None where none is; `silent`, whether no number shows it on these inputs; `refused`, what is
        said by a comparison that is refused; and what the usual practice finds.
    """
    args = model.inputs(np.random.default_rng(seed))
    theirs, mine = model.make(Plan(fault), seed)
    began = time.perf_counter()
    try:
        report = compared(theirs, mine, args, model, seed)
    except InputError as error:
        return refusal(model, fault, seed, error) | usual_practice(theirs, mine, args)
    seconds = time.perf_counter() - began
    found = report.diagnosis
    places = tuple(one.path for one in found.isolation.faults) if found and fault and fault.kind == UNLOADED else ()
    row: Row = {
        "model": model.name,
        "place": fault.place if fault else None,
        "kind": fault.kind if fault else None,
        "found": not report.passed,
        "levels": [level.level for level in report.levels if level.status == "failed"],
        "modules": sorted({one.path for one in found.isolation.faults}) if found else [],
        "causes": [cause.hypothesis for cause in found.causes_of(fault.places[0])] if found and fault else [],
        "operation": operation_at(found, places or fault.places) if found and fault else None,
        "silent": is_silent(found) if found else False,
        "settings": list(found.settings) if found else [],
        "tried": found.tried if found else 0,
        "seconds": round(seconds, 2),
        "seed": seed,
        "code": code_version(),
    }
    if fault:
        named, first = judged(row, found, fault, theirs)
        row |= {"exact": named, "cause": first, **usual_practice(theirs, mine, args)}
    return row


def compared(theirs: Any, mine: Any, args: Any, model: Model, seed: int) -> parity.Report:
    """The report: of the levels without native precision and gradients, if one of these fails already; else of all.

    A fault that a cheap level finds needs no dear one, and what is named is the same: that comes from the diagnosis.
    """
    given = [torch.from_numpy(one) for one in args]
    report = parity.compare(theirs, mine, *given, rename=model.rename, seed=seed, levels=FIRST)
    return parity.compare(theirs, mine, *given, rename=model.rename, seed=seed) if report.passed else report


def refusal(model: Model, fault: Fault | None, seed: int, error: InputError) -> Row:
    """What a comparison says that is refused: that the two agree it does not say, so that a fault is found.

    It names the module if that is the one at which it says that the model draws, in torch's words or in
    Linen's, and the cause if that is what it says.
    """
    place = fault.place if fault else ""
    spelled = {place, re.sub(r"\.(\d+)", r"_\1", place)}
    draws = error.code == "not repeatable"
    row: Row = {
        "model": model.name,
        "place": place if fault else None,
        "kind": fault.kind if fault else None,
        "found": True,
        "levels": [],
        "modules": [place] if draws and any(f" is {name} (" in str(error) for name in spelled if name) else [],
        "causes": ["dropout left on"] if draws and "where dropout is called" in str(error) else [],
        "operation": None,
        "settings": [],
        "tried": 0,
        "refused": str(error),
        "seconds": 0.0,
        "seed": seed,
        "code": code_version(),
    }
    known = bool(fault and row["causes"]) and row["causes"][0] in wanted(fault.kind if fault else "")
    return row | {"exact": bool(fault) and row["modules"] == [place], "cause": known}


def judged(row: Row, found: Diagnosis | None, fault: Fault, theirs: torch.nn.Module) -> tuple[bool, bool]:
    """Whether exactly the module of the fault is named, and whether its cause is ranked first."""
    if found and fault.kind == UNLOADED:
        # Each module that has parameters of its own is wrong, and no other; for each that is the cause.
        owners = {name for name, one in theirs.named_modules() if list(one.parameters(recurse=False))}
        looked_at = {one.path for one in found.isolation.modules} & owners
        firsts = [causes[0].hypothesis if (causes := found.causes_of(path)) else "" for path in row["modules"]]
        return set(row["modules"]) == looked_at, bool(firsts) and set(firsts) == {"weights"}
    # A setting that these inputs do not show, such as a momentum, is named by the ledger alone.
    by_setting = not row["modules"] and any(sentence.partition(":")[0] == fault.place for sentence in row["settings"])
    first = bool(row["causes"]) and row["causes"][0] in wanted(fault.kind)
    return row["modules"] == sorted(fault.places) or by_setting, first or by_setting


def is_silent(found: Diagnosis) -> bool:
    """Whether nothing that is computed differs: then a setting or an array is named, and no operation can be."""
    differing = [one.where for module in found.isolation.faults for one in module.differences]
    return all(where.startswith("array ") for where in differing)


def operation_at(found: Diagnosis, places: tuple[str, ...]) -> str | None:
    """Torch's and Flax's operation that are named inside a wrong module; None where one of them is not."""
    for one in found.isolation.faults:
        told = one.operation if one.path in places else None
        if told and told.torch and told.flax:
            return f"{told.torch.operation}, {told.flax.operation}"
    return None


# ---------------------------------------------------------------- the usual practice


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


# ---------------------------------------------------------------- by what it was measured


@cache
def code_version() -> str:
    """A short hash of the checker's and the catalogue's code: rows of another are not of this code."""
    here = Path(__file__).parent
    files = [
        *Path(parity.__file__).parent.rglob("*.py"),
        *(f for f in here.glob("*.py") if f.name not in ("report.py", "__main__.py")),
    ]
    told = hashlib.sha256()
    for file in sorted(files, key=lambda f: (f.parent.name, f.name)):
        told.update(file.read_bytes())
    return told.hexdigest()[:12]


def versions() -> dict[str, str]:
    """What was installed."""
    found = {"torch": torch.__version__, "jax": jax.__version__, "flax": flax.__version__}
    return found | {"numpy": np.__version__, "python": platform.python_version()}
