"""False alarms: `parity.compare` on faithful pairs with random shapes, scales and seeds.

    python -m benchmarks.clean_trials --trials 10000 --seed 0 --out benchmarks/results/clean_trials.json

A run that was stopped goes on where it was when it is given the same file. Every alarm is written down with its number;
`--trial K` repeats it alone and prints the report. Several processes share a run by `--part 1/2` and `--part 2/2`, each
with a file of its own; `--merge` adds those up.
"""

import hashlib
import json
import os
import platform
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import torch
import typer
from rich.console import Console

import parity
from benchmarks import clean_pairs
from parity.cli import progress_bar
from parity.errors import InputError, first_line
from parity.evidence.compare import climb
from parity.evidence.result import LEVELS, Report
from parity.evidence.subject import Subject
from parity.evidence.trace import trace_subject

# Trials that share one pair of one shape: more would be cheaper, fewer would try more shapes.
SHARED = 40
# A trial that takes longer has not passed.
SECONDS = 300
# Of so many trials one is traced module by module too.
TRACED = 5
SAVED_EVERY = 10.0

RATIOS = ("identical", "native", "gradients", "native gradients", "trace", "last look")
# What is run in addition where the noise of the runs before does not explain an error.
LOOKS = ("ensemble", "shaken", "elementary", "elementary_more")
EDGES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# Largest ratios whose trials are written down, to be looked at.
LARGEST = 20


class OutOfTimeError(BaseException):
    """No `Exception`: what a level catches would turn it into a level that could not run."""


@dataclass
class Trial:
    """One comparison.

    Attributes:
        number: of the trial.
        pair: its name.
        dtype: in which it ran.
        outcome: `passed`, `alarm`, `refused` by both sides, `timed out`, or `error`.
        levels: status of each.
        ratios: difference over what is allowed, by level.
        report: what was found.
        text: what is said of it, where it did not pass.
        looks: how many of `LOOKS` were taken.
        seconds: it took.
    """

    number: int
    pair: str
    dtype: str
    outcome: str = "passed"
    levels: dict[str, str] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    report: Report | None = None
    text: str = ""
    looks: int = 0
    seconds: float = 0.0


def compared(program: clean_pairs.Program, seed: int, number: int, fresh: bool) -> Trial:
    """One trial of a program; `fresh` is its first one, which tries bad input too."""
    trial, begin = Trial(number, program.pair, program.dtype), time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        torch_model, flax_model, args = program.trial(np.random.default_rng([seed, number, 2]))
        subject = Subject(torch_model, flax_model, args, {}, seed=number, pins_checked=not fresh, rename=program.rename)
        # What a probe of exact sums finds depends on the shapes, not on the numbers.
        levels = LEVELS if fresh else tuple(level for level in LEVELS if level != "wiring")
        trial.report = climb(subject, levels, ("compiled",), spoil=fresh, diagnose=False)
        trial.levels = {level.level: level.status for level in trial.report.levels}
        trial.ratios = ratios(trial.report)
        trial.looks = sum(look in vars(subject) for look in LOOKS)
        if trial.looks == len(LOOKS):
            trial.ratios["last look"] = max(trial.ratios.get(name, 0.0) for name in ("native", "native gradients"))
        if not trial.report.passed:
            trial.outcome, trial.text = "alarm", str(trial.report)
        elif number % TRACED == 0:
            traced = trace_subject(subject)
            trial.ratios["trace"] = max((step.ratio for step in traced.steps), default=0.0)
            trial.levels["trace"] = "passed" if traced.passed else "failed"
            if not traced.passed:
                trial.outcome, trial.text = "alarm", str(traced)
    except OutOfTimeError:
        trial.outcome = "timed out"
    except InputError as error:
        trial.outcome, trial.text = ("refused" if "both models refuse" in str(error) else "error"), str(error)
    except Exception as error:
        trial.outcome, trial.text = "error", f"{type(error).__name__}: {first_line(error)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    trial.seconds = time.perf_counter() - begin
    return trial


def ratios(report: Report) -> dict[str, float]:
    """The largest difference over what is allowed, by level, of the levels that have one."""
    wanted = (("identical", "ratio"), ("native", "ratio"), ("gradients", "ratio"), ("gradients", "native_ratio"))
    found = zip(RATIOS, ((report.level(level).figures, name) for level, name in wanted))
    return {key: float(figures[name]) for key, (figures, name) in found if name in figures}


# ---------------------------------------------------------------- the sum of all trials


def empty_record(seed: int, part: str = "1/1") -> dict[str, Any]:
    """Nothing counted yet."""
    return {
        "command": "python -m benchmarks.clean_trials",
        "seed": seed,
        "part": part,
        "code": fingerprint(),
        "versions": versions(),
        "trials": 0,
        "outcomes": {},
        "dtypes": {},
        "looks": [0] * (1 + len(LOOKS)),
        "pairs": {},
        "ratios": {name: {"largest": 0.0, "trial": None, "histogram": [0] * len(EDGES)} for name in RATIOS},
        "edges": list(EDGES),
        "largest": [],
        "alarms": [],
        "seconds": 0.0,
    }


def count(record: dict[str, Any], trial: Trial) -> None:
    """Add one trial."""

    def one_more(counts: dict[str, int], key: str) -> None:
        counts[key] = counts.get(key, 0) + 1

    record["trials"] += 1
    record["seconds"] = round(record["seconds"] + trial.seconds, 2)
    one_more(record["outcomes"], trial.outcome)
    one_more(record["dtypes"], trial.dtype)
    record["looks"][trial.looks] += 1
    by_level = record["pairs"].setdefault(trial.pair, {})
    for level, status in trial.levels.items():
        one_more(by_level.setdefault(level, {}), status)
    for name, ratio in trial.ratios.items():
        kept = record["ratios"][name]
        kept["histogram"][max(0, int(np.searchsorted(EDGES, ratio, side="right")) - 1)] += 1
        if ratio > kept["largest"]:
            kept["largest"], kept["trial"] = ratio, trial.number
    worst = max(trial.ratios.items(), key=lambda item: item[1], default=("", 0.0))
    told = {"trial": trial.number, "pair": trial.pair, "dtype": trial.dtype}
    record["largest"] = sorted(
        [*record["largest"], {**told, "level": worst[0], "ratio": worst[1]}], key=lambda one: -one["ratio"]
    )[:LARGEST]
    if trial.outcome != "passed":
        record["alarms"].append({**told, "outcome": trial.outcome, "text": trial.text[:1500]})


def fingerprint() -> str:
    """Of the code that judges and of the code that draws: counts of two versions are not added up.

    What explains a failure, the hypotheses, judges nothing.
    """
    root = Path(__file__).parents[1]
    judging = [path for path in (root / "parity" / "evidence").rglob("*.py") if path.parent.name != "hypotheses"]
    files = sorted([*judging, *(root / "benchmarks").glob("clean_*.py")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of everything whose rounding is measured."""
    found = {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__}
    return found | {"jax": jax.__version__, "flax": parity.environment()["flax"], "machine": platform.machine()}


def merged(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The sum of the parts of one run.

    Raises:
        InputError: they are not of one run, or one part is there twice.
    """
    for key in ("seed", "code", "versions"):
        if any(record[key] != records[0][key] for record in records):
            raise InputError(f"these are not of one run: {key} is {' and '.join(str(record[key]) for record in records)}")
    parts = [record["part"] for record in records]
    if len(set(parts)) != len(parts):
        raise InputError(f"a part is there twice: {', '.join(parts)}")
    found = empty_record(records[0]["seed"])
    found |= {key: records[0][key] for key in ("code", "versions")}
    for record in records:
        found["trials"] += record["trials"]
        found["seconds"] = round(found["seconds"] + record["seconds"], 2)
        found["looks"] = [a + b for a, b in zip(found["looks"], record["looks"], strict=True)]
        for key in ("outcomes", "dtypes"):
            found[key] = dict(Counter(found[key]) + Counter(record[key]))
        for pair, levels in record["pairs"].items():
            known = found["pairs"].setdefault(pair, {})
            for level, counts in levels.items():
                known[level] = dict(Counter(known.get(level, {})) + Counter(counts))
        for name, kept in record["ratios"].items():
            known = found["ratios"][name]
            known["histogram"] = [a + b for a, b in zip(known["histogram"], kept["histogram"], strict=True)]
            if kept["trial"] is not None and kept["largest"] >= known["largest"]:
                known["largest"], known["trial"] = kept["largest"], kept["trial"]
    found["largest"] = sorted((one for r in records for one in r["largest"]), key=lambda one: -one["ratio"])[:LARGEST]
    found["alarms"] = sorted((one for r in records for one in r["alarms"]), key=lambda one: one["trial"])
    return found


def read_record(path: Path, seed: int, part: str = "1/1") -> dict[str, Any]:
    """What a run that was stopped has counted.

    Raises:
        InputError: it had another seed, was another part, or had other code.
    """
    if not path.exists():
        return empty_record(seed, part)
    record = json.loads(path.read_text(encoding="utf-8"))
    new = empty_record(seed, part)
    unequal = [
        f"{key} {record.get(key)!r}, now {new[key]!r}"
        for key in ("seed", "part", "code", "versions")
        if record.get(key) != new[key]
    ]
    if unequal:
        raise InputError(f"{path} was begun with {'; '.join(unequal)}: give --out another file, or remove this one")
    return record


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def run(
    record: dict[str, Any], upto: int, save: Callable[[], None], tell: Callable[[Trial], None], deadline: float = np.inf
) -> None:
    """Go on until all trials below `upto` that are in its part are counted, or the clock has reached the deadline."""
    seed, saved, current = record["seed"], time.monotonic(), -1
    part, parts = (int(number) for number in record["part"].split("/"))
    numbers = [number for number in range(upto) if number // SHARED % parts == part - 1]
    while record["trials"] < len(numbers) and time.monotonic() < deadline:
        number = numbers[record["trials"]]
        if number // SHARED != current:
            clean_pairs.forget()
            current = number // SHARED
            program = clean_pairs.program(seed, current)
        trial = compared(program, seed, number, number % SHARED == 0)
        count(record, trial)
        tell(trial)
        if time.monotonic() - saved > SAVED_EVERY:
            save()
            saved = time.monotonic()
    save()


def out_of_time(*_: Any) -> None:
    raise OutOfTimeError


def main(
    trials: Annotated[int, typer.Option(help="how many are counted in all")] = 1000,
    seed: Annotated[int, typer.Option(help="of shapes, weights and inputs")] = 0,
    out: Annotated[Path, typer.Option(help="the file of the counts; a run that was stopped goes on")] = Path(
        "clean_trials.json"
    ),
    trial: Annotated[int | None, typer.Option(help="one trial alone, with its report")] = None,
    minutes: Annotated[float, typer.Option(help="stop after so many; the file can be gone on with")] = np.inf,
    part: Annotated[str, typer.Option(help="which part of the trials this process counts, such as 1/2")] = "1/1",
    merge: Annotated[list[Path] | None, typer.Option(help="add up the files of all parts, and count nothing")] = None,
) -> None:
    """Count false alarms."""
    console = Console()
    clean_pairs.quiet()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, out_of_time)
    if trial is not None:
        program = clean_pairs.program(seed, trial // SHARED)
        one = compared(program, seed, trial, True)
        console.print(f"{one.pair}, {program.shape}, {one.dtype}: {one.outcome} {one.ratios}", highlight=False)
        console.print(one.text or one.report, markup=False, highlight=False)
        raise typer.Exit(0 if one.outcome == "passed" else 1)
    if merge:
        write_record(out, merged([json.loads(path.read_text(encoding="utf-8")) for path in merge]))
        raise typer.Exit(0)
    record = read_record(out, seed, part)
    with progress_bar(console) as bar:
        task = bar.add_task("clean trials", total=trials, completed=record["trials"])

        def tell(one: Trial) -> None:
            bar.update(task, completed=record["trials"], description=one.pair[:28])

        run(record, trials, lambda: write_record(out, record), tell, time.monotonic() + 60 * minutes)
    worst = ", ".join(f"{name} {kept['largest']:.2g}" for name, kept in record["ratios"].items())
    console.print(
        f"{record['trials']} trials: {record['outcomes']}; largest difference over the allowed: {worst}", highlight=False
    )
    raise typer.Exit(0 if record["outcomes"] == {"passed": record["trials"]} else 1)


if __name__ == "__main__":
    typer.run(main)
