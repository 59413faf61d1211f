"""Every planted fault through `parity.compare`, beside the usual practice.

    python -m benchmarks.faults --out benchmarks/results/faults.json

writes the rows and, beside them, the tables in Markdown. A run takes about half an hour on one core:
`--resume` keeps the rows of the file that were measured with this very code, `--only` takes a part of the
pairs, and `--merge` joins the files of several parts.
"""

import argparse
import warnings
from pathlib import Path

import jax

from benchmarks.faults import image_models, linen_models, recurrent_models, reference_models, sequence_models
from benchmarks.faults.measuring import Row, code_version, measured, versions
from benchmarks.faults.planting import Fault, Model
from benchmarks.faults.report import key, merged, read, summary, write

MODELS: tuple[Model, ...] = (
    *sequence_models.MODELS,
    *image_models.MODELS,
    *recurrent_models.MODELS,
    *reference_models.MODELS,
    *linen_models.MODELS,
)


def main() -> None:
    """Run the catalogue, or join what was measured, and write what was found."""
    options = arguments()
    warnings.simplefilter("ignore")
    if options.merge:
        rows = merged(map(read, options.merge))
    else:
        rows = run(options.only, options.fault, options.seed, options.out, options.resume)
    print(summary(rows))
    if options.out:
        write(options.out, rows, versions())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="the pair of this name, or those whose names contain it; several may be given",
    )
    parser.add_argument("--fault", default="", help="the faults whose place and kind contain this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for the rows; the tables lie beside it, as .md")
    parser.add_argument("--resume", action="store_true", help="keep the rows in --out that were measured with this code")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="JSON", help="measure nothing, join these files into --out")
    options = parser.parse_args()
    if (options.resume or options.merge) and not options.out:
        parser.error("--resume and --merge need --out, the file that is read and written")
    return options


def run(only: list[str] | None, part: str, seed: int, out: Path | None, resume: bool) -> list[Row]:
    """Measure the faults one by one; each is written as soon as it is measured."""
    before = {key(row): row for row in read(out, missing_is_empty=True)} if out and resume else {}
    known = {name: row for name, row in before.items() if row["code"] == code_version()}
    rows: list[Row] = []
    for model in MODELS:
        if only and not any(asked(name, model) for name in only):
            continue
        for fault in (None, *model.catalogue()):
            if part not in f"{fault}":
                continue
            name = (model.name, *((fault.place, fault.kind) if fault else (None, None)), seed)
            row = known.get(name) or measured(model, fault, seed)
            rows.append(row)
            print(line(model, fault, row), flush=True)
            if out:
                write(out, merged([list(before.values()), rows]), versions())
        jax.clear_caches()
    return merged([list(before.values()), rows])


def asked(name: str, model: Model) -> bool:
    """Whether a name means a pair: the pair of that very name, if there is one, else those that contain it."""
    return name == model.name if any(name == one.name for one in MODELS) else name in model.name


def line(model: Model, fault: Fault | None, row: Row) -> str:
    words = "clean" if fault is None else f"{fault}"
    marks = " ".join(told for told in ("found", "exact", "cause") if row.get(told))
    return f"{model.name:<20} {words:<64} {marks:<18} {row['seconds']:6.1f} s  {', '.join(row['causes'][:2])}"


if __name__ == "__main__":
    main()
