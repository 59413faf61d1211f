"""What the catalogue's rows say: a JSON file of all of them, and tables in Markdown."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.causes import wanted

Row = dict[str, Any]
# What is counted of the faults: the heading, and the key in a row.
OURS = (("found", "found"), ("module exact", "exact"), ("op named", "operation"), ("cause first", "cause"))
USUAL = (("`torch.testing`", "torch.testing"), ("within 1e-3", "1e-3"), ("means", "means"))
REGENERATE = "python -m benchmarks.faults --out benchmarks/results/faults.json"


def key(row: Row) -> tuple[Any, ...]:
    """What a row is about."""
    return row["model"], row["place"], row["kind"], row["seed"]


def read(path: Path, *, missing_is_empty: bool = False) -> list[Row]:
    """The rows of a file."""
    if missing_is_empty and not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text())["rows"]
    return rows


def merged(parts: Iterable[Sequence[Row]]) -> list[Row]:
    """The rows of several runs; of one that was measured twice, the later."""
    return list({key(row): row for part in parts for row in part}.values())


def write(path: Path, rows: Sequence[Row], versions: dict[str, str]) -> None:
    """The rows as JSON, and beside them the tables, each file whole or not at all."""
    replaced(path, json.dumps({"versions": versions, "rows": list(rows)}, indent=1) + "\n")
    replaced(path.with_suffix(".md"), markdown(rows, versions))


def replaced(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    temporary.replace(path)


def summary(rows: Sequence[Row]) -> str:
    """The share of faults that each way finds, and how well they are named, for a terminal."""
    faults, clean = planted(rows), [row for row in rows if not row["kind"]]
    lines = [f"{len(faults)} faults in {len({row['model'] for row in faults})} pairs of models"]
    for name, told in (*OURS, *USUAL):
        count = counted(faults, told)
        lines.append(f"  {name.strip('`'):<14} {count:>4}  {100 * count / max(1, len(faults)):5.1f} %")
    return "\n".join([*lines, f"{len(clean)} clean pairs: {counted(clean, 'found')} false alarms"])


def markdown(rows: Sequence[Row], versions: dict[str, str]) -> str:
    """All tables: the whole, by pair of models, by kind, fault by fault."""
    faults, clean = planted(rows), [row for row in rows if not row["kind"]]
    codes = sorted({row["code"] for row in rows})
    installed = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        "# Planted faults",
        "",
        f"{len(faults)} faults, each planted alone in the Flax model of one of {len({r['model'] for r in rows})} pairs, "
        "through `parity.compare` and, beside it, through what is usually done: `torch.testing.assert_close` with its "
        "defaults on the outputs, `allclose` at 1e-3, and the means of the outputs at 1e-3.",
        "",
        f"Made by `{REGENERATE}` with {installed}; code {', '.join(codes)}.",
        "",
        f"Clean pairs: {len(clean)}, false alarms: {counted(clean, 'found')}.",
        "",
        f"Of {counted(faults, 'silent')} of the faults nothing that is computed shows on these inputs (a momentum, a row that "
        "no id takes): a setting or an array is named there, and no operation.",
        "",
        *table(("", *(h for h, _ in (*OURS, *USUAL))), [whole(faults)]),
        "",
        "## By pair of models",
        "",
        *grouped("pair", faults, lambda row: row["model"]),
        "",
        "## By kind",
        "",
        "A kind is named after the cause that tells it best.",
        "",
        *grouped("kind", faults, lambda row: (wanted(row["kind"]) or ("other",))[0]),
        "",
        "## Fault by fault",
        "",
        *table(
            ("pair", "module", "fault", *(h for h, _ in OURS), "named first", "s", *(h for h, _ in USUAL)), map(single, faults)
        ),
    ]
    return "\n".join(lines) + "\n"


def planted(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["kind"]]


def counted(rows: Sequence[Row], told: str) -> int:
    return sum(bool(row.get(told)) for row in rows)


def whole(faults: Sequence[Row]) -> list[str]:
    """How many, and the share."""
    counts = [counted(faults, told) for _, told in (*OURS, *USUAL)]
    return [f"of {len(faults)}", *(f"{count} ({100 * count / max(1, len(faults)):.1f} %)" for count in counts)]


def grouped(name: str, faults: Sequence[Row], by: Callable[[Row], str]) -> list[str]:
    """One line for each group of faults, in the order in which they come."""
    groups: dict[str, list[Row]] = {}
    for row in faults:
        groups.setdefault(by(row), []).append(row)
    lines = []
    for group, those in groups.items():
        seconds = sum(row["seconds"] for row in those) / len(those)
        counts = [str(counted(those, told)) for _, told in (*OURS, *USUAL)]
        lines.append([group, str(len(those)), *counts, f"{seconds:.1f}"])
    return table((name, "planted", *(h for h, _ in (*OURS, *USUAL)), "s each"), lines)


def single(row: Row) -> list[str]:
    """One fault: what is said of it."""

    def sign(told: str) -> str:
        return "yes" if row.get(told) else "no"

    elsewhere = "" if row["exact"] else f" ({', '.join(f'`{path}`' for path in row['modules']) or 'none'})"
    named = [sign("found"), sign("exact") + elsewhere, row.get("operation") or "-", sign("cause")]
    first = row["causes"][0] if row["causes"] else "a setting" if row["cause"] and row["settings"] else "-"
    # Weights that were not loaded are told module by module.
    first = "weights" if row["cause"] and first == "-" else first
    place = f"`{row['place']}`" if row["place"] else "the model"
    return [row["model"], place, row["kind"], *named, first, f"{row['seconds']:.1f}", *(sign(told) for _, told in USUAL)]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)]
