"""The page of the fault catalogue, from what was measured.

    python -m benchmarks.publish

writes docs/catalogue.md from benchmarks/results/faults.json and benchmarks/results/clean_trials.json, which
`python -m benchmarks.faults` and `python -m benchmarks.clean_trials` write. Nothing is measured here.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.faults import report
from benchmarks.faults.causes import wanted
from benchmarks.faults.report import Row

ROOT = Path(__file__).parents[1]
FAULTS = ROOT / "benchmarks" / "results" / "faults.json"
CLEAN = ROOT / "benchmarks" / "results" / "clean_trials.json"
PAGE = ROOT / "docs" / "catalogue.md"
COMMAND = "python -m benchmarks.publish"

# What the project asks of itself, beside what is measured.
WANTED = {"found": "all", "exact": "97 %", "cause": "90 %"}
TOLD = {
    "found": "found",
    "exact": "the module named, and no other",
    "cause": "the right cause ranked first",
}
# Key and heading of what is usually done.
PRACTICE = {
    "torch.testing": "`torch.testing`",
    "1e-3": "within 1e-3",
    "means": "means",
}
LEVELS = ("weights", "structure", "wiring", "identical", "native", "gradients")
# How sure the bound of the rate of false alarms is.
CONFIDENCE = 0.95


def page(faults: Mapping[str, Any], clean: Mapping[str, Any]) -> str:
    """The whole page in Markdown.

    Args:
        faults: what `benchmarks.faults` wrote.
        clean: what `benchmarks.clean_trials` wrote.
    """
    planted = report.planted(faults["rows"])
    untouched = [row for row in faults["rows"] if not row["kind"]]
    parts = [
        introduction(planted),
        summary(planted),
        false_alarms(untouched, clean),
        missed(planted),
        groups(planted),
        trials(clean),
        reproduce(faults, clean),
        every(planted),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def introduction(planted: Sequence[Row]) -> str:
    pairs, kinds = len({row["model"] for row in planted}), len({row["kind"] for row in planted})
    return f"""# The fault catalogue, measured

{len(planted)} faults of {kinds} kinds were planted, each alone, in the Flax model of one of {pairs} pairs of small models:
encoders, decoders, convolutional and recurrent nets, written in NNX and in Linen. Each pair went through
`parity.compare`, with nothing told of the fault, and through what is usually done to the final output:
`torch.testing.assert_close` with its defaults, `allclose(rtol=1e-3, atol=1e-3)`, and the means compared to 1e-3.
Beside them ran pairs without a fault, of random shapes, scales and seeds. This page is written by
`{COMMAND}` from the files of those runs.

A module counts as named if it is named *and no other is*. A cause counts if the hypothesis ranked first there is one of
those that `benchmarks/faults/causes.py` has for that kind of fault: written down before any was tried, but for a few that
were added when a result named the same change by another name. The levels `native` and `gradients` were climbed only where
those below passed."""


def summary(planted: Sequence[Row]) -> str:
    """What is found, and by whom."""
    found = share(planted, "found"), *(share(planted, told) for told in PRACTICE)
    # Where nothing that is computed shows, a setting or an array is named, and there is no operation to name.
    computed = [row for row in planted if not row.get("silent")]
    named_first = f"an operation named on both sides, of {len(computed)} that change what is computed"
    lines = [
        [TOLD["found"], *found, WANTED["found"]],
        *([TOLD[told], share(planted, told), "-", "-", "-", WANTED[told]] for told in ("exact", "cause")),
        [named_first, share(computed, "operation"), "-", "-", "-", ""],
    ]
    alone = sum(not any(row.get(told) for told in PRACTICE) for row in planted if row["found"])
    seconds = [row["seconds"] for row in planted]
    return section(
        "Faults",
        *report.table((f"of {len(planted)} planted faults", "`parity.compare`", *PRACTICE.values(), "wanted"), lines),
        "",
        f"{alone} of them are found by `parity.compare` and by none of the three usual ways. The usual ways name neither a "
        f"module nor a cause. A comparison with its diagnosis took {statistics.median(seconds):.1f} s in the middle and "
        f"{max(seconds):.0f} s at most, mostly compilation."
        if seconds
        else "",
    )


def false_alarms(untouched: Sequence[Row], clean: Mapping[str, Any]) -> str:
    """What is said of pairs without a fault."""
    outcomes = clean["outcomes"]
    judged, alarms = outcomes.get("passed", 0) + outcomes.get("alarm", 0), outcomes.get("alarm", 0)
    others = {name: count for name, count in outcomes.items() if name not in ("passed", "alarm")}
    rest = f" {', '.join(f'{count:,} {name}' for name, count in others.items())}: not counted." if others else ""
    in_catalogue = report.counted(untouched, "found")
    return section(
        "False alarms",
        f"**{alarms:,} in {judged:,}** comparisons of pairs without a fault (wanted: 0 of 10,000); so that the rate is below "
        f"{percent(upper_bound(alarms, judged))} with a confidence of {100 * CONFIDENCE:.0f} %.{rest}",
        "",
        f"The {len(untouched)} pairs of the catalogue without their faults: {in_catalogue} alarms.",
        *(["", *report.table(("trial", "pair", "dtype", "outcome"), map(alarm, clean["alarms"]))] if clean["alarms"] else []),
    )


def alarm(one: Mapping[str, Any]) -> list[str]:
    return [str(one["trial"]), one["pair"], one["dtype"], one["outcome"]]


def missed(planted: Sequence[Row]) -> str:
    """Every fault that is not found, not named exactly, or whose cause is not first: what was said instead."""
    lines = []
    for row in planted:
        wrong = [TOLD[told] for told in TOLD if not row.get(told)]
        if not wrong:
            continue
        modules = ", ".join(map(named, row["modules"])) or "none"
        missed_here = f"not {', nor '.join(wrong)}"
        lines.append([row["model"], named(row["place"]), row["kind"], missed_here, modules, first_cause(row)])
    if not lines:
        return section("What is missed", "Nothing: every fault is found, its module named alone, its cause ranked first.")
    return section(
        "What is missed",
        f"{len(lines)} of {len(planted)}, all of them:",
        "",
        *report.table(("pair", "module", "fault", "missed", "modules named", "cause named first"), lines),
    )


def groups(planted: Sequence[Row]) -> str:
    """By pair of models, and by kind of fault."""
    by_pair = report.grouped("pair", planted, lambda row: row["model"])
    by_kind = report.grouped("kind", sorted(planted, key=kind), kind)
    told = "A kind is named after the cause that tells it best."
    return "\n\n".join((section("By pair of models", *by_pair), section("By kind of fault", told, "", *by_kind)))


def kind(row: Row) -> str:
    return (wanted(row["kind"]) or ("other",))[0]


def trials(clean: Mapping[str, Any]) -> str:
    """The pairs without a fault, and how far the largest difference was from an alarm."""
    lines = []
    for name, levels in sorted(clean["pairs"].items()):
        passed = {level: told.get("passed", 0) for level, told in levels.items()}
        lines.append([name, *(f"{passed[level]:,}" if passed.get(level) else "-" for level in LEVELS)])
    ratios = [[name, f"{kept['largest']:.2g}"] for name, kept in clean["ratios"].items() if kept["trial"] is not None]
    return section(
        "Pairs without a fault",
        "How often each level passed; `-` where it does not apply. Shapes, weights, inputs, their magnitudes and the dtype are "
        "random; a trial climbs every level, one in five is traced besides. Left out is what is no faithful pair: attention of "
        "Flax in float16, whose scores overflow where torch keeps them in float32; weights above 10 in models with attention; "
        "a gradient of `jnp.std` at 0; Linen's `WeightNorm`.",
        "",
        *report.table(("pair", *LEVELS), lines),
        "",
        "The largest difference of all, as a part of what is allowed (1 would be an alarm):",
        "",
        *report.table(("level", "largest"), ratios),
    )


def reproduce(faults: Mapping[str, Any], clean: Mapping[str, Any]) -> str:
    codes = sorted({row["code"] for row in faults["rows"]})
    seeds = sorted({row["seed"] for row in faults["rows"]})
    return section(
        "Again, on your machine",
        "```bash",
        report.REGENERATE + "   # about half an hour on one core",
        f"{clean['command']} --trials 10000 --seed {clean['seed']} --out benchmarks/results/clean_trials.json   # hours",
        COMMAND,
        "```",
        "",
        f"The faults: {listed(faults['versions'])}; seed {', '.join(map(str, seeds))}; code {', '.join(codes)}. "
        f"The pairs without: {listed(clean['versions'])}; seed {clean['seed']}; code {clean['code']}. "
        "A code is a hash of the checker and of the benchmark; rows of more than one were measured at different times.",
    )


def every(planted: Sequence[Row]) -> str:
    """Fault by fault."""
    names = ("pair", "module", "fault", *(heading for heading, _ in report.OURS))
    head = (*names, "named first", "s", *(heading for heading, _ in report.USUAL))
    return section("Fault by fault", *report.table(head, map(report.single, planted)))


# ---------------------------------------------------------------- figures


def upper_bound(alarms: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """The largest rate of alarms under which so few are not yet unlikely.

    Args:
        alarms: seen.
        trials: in which they were seen, at least as many.
        confidence: of the bound.

    Returns:
        A rate from 0 to 1; without a trial 1.

    Source:
        Clopper and Pearson 1934, "The use of confidence or fiducial limits illustrated in the case of the binomial",
        the upper limit of one side.
    """
    if alarms >= trials:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(alarms, trials, middle) > 1 - confidence else (low, middle)
    return high


def at_most(alarms: int, trials: int, rate: float) -> float:
    """How probable so few alarms, or fewer, are at a rate between 0 and 1."""
    log_rate, log_rest = math.log(rate), math.log1p(-rate)

    def log_ways(k: int) -> float:
        return math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)

    return math.fsum(math.exp(log_ways(k) + k * log_rate + (trials - k) * log_rest) for k in range(alarms + 1))


def share(rows: Sequence[Row], told: str) -> str:
    count = report.counted(rows, told)
    return f"{count} ({100 * count / max(1, len(rows)):.1f}&nbsp;%)"


def percent(rate: float) -> str:
    return f"{100 * rate:.2g} %"


# ---------------------------------------------------------------- words


def section(title: str, *lines: str) -> str:
    return "\n".join((f"## {title}", "", *lines)).rstrip("\n")


def named(path: str) -> str:
    return f"`{path}`" if path else "the model"


def first_cause(row: Row) -> str:
    return row["causes"][0] if row["causes"] else "none"


def listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def main(
    faults: Annotated[Path, typer.Option(help="what benchmarks.faults wrote")] = FAULTS,
    clean: Annotated[Path, typer.Option(help="what benchmarks.clean_trials wrote")] = CLEAN,
    out: Annotated[Path, typer.Option(help="the page")] = PAGE,
) -> None:
    """Write the page of the fault catalogue."""
    report.replaced(out, page(read(faults), read(clean)))


if __name__ == "__main__":
    typer.run(main)
