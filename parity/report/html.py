"""Results as a page that needs no network, and as a fragment for notebooks.

The words are those of `parity.report.text`: a face of the product says what the others say.
"""

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parity.errors import InputError
from parity.report import text
from parity.report.data import as_data
from parity.report.modules import Node, module_tree
from parity.report.plan import coded_sentences, how, sums
from parity.weights.files import beside

if TYPE_CHECKING:
    from parity.evidence.faults import Isolated
    from parity.evidence.pictures import Picture
    from parity.evidence.result import Diff, Report, Step, Trace
    from parity.suite import CaseResult, SuiteResult
    from parity.training.outcome import Training
    from parity.weights.transfer import Transfer

PAGE = Path(__file__).parent / "page"
# More than there are of anything: on a page nothing is left out.
EVERY = 10**9
# The bar of a module spans these powers of ten of an error over what rounding explains.
LEAST, MOST = -4.0, 12.0


def save_report(report: "Report", path: str | os.PathLike[str], title: str = "") -> Path:
    """Write the page of one comparison.

    Args:
        report: what `parity.compare` returned.
        path: of the page; an existing one is replaced, once the new one is whole.
        title: above the verdict, such as the names of the two models.

    Returns:
        The path.

    Raises:
        InputError: the packages that draw are not installed, or the page cannot be written.
    """
    return written(Path(path), report_page(report, title))


def save_suite(result: "SuiteResult", path: str | os.PathLike[str]) -> Path:
    """Write the page of a whole suite; as `save_report`."""
    return written(Path(path), suite_page(result))


def written(path: Path, page: str) -> Path:
    """Put a page in its place, in one step."""
    html_ready(path)
    with beside(path) as temporary:
        # A name may be no valid text.
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
    return path


def html_ready(path: str | os.PathLike[str]) -> None:
    """Tell what keeps a page from being made or written there.

    Raises:
        InputError: a package is missing, or the place cannot hold a file; all that is wrong at once.
    """
    path = Path(path)
    missing = [name for name in ("jinja2", "plotly") if importlib.util.find_spec(name) is None]
    problems = []
    if missing:
        one = len(missing) == 1
        problems.append(
            f"a page needs {' and '.join(missing)}, which {'is' if one else 'are'} not installed: "
            "pip install 'torch-flax-parity[report]'"
        )
    folder = path.absolute().parent
    if path.is_dir():
        problems.append(f"{path} is a folder; give the name of a file in it, such as {path / 'report.html'}")
    elif path.exists() and not path.is_file():
        problems.append(f"{path} is no file that a page could replace; give the name of one")
    elif folder.exists() and not folder.is_dir():
        problems.append(f"{path.parent} is a file, not a folder; give a page another place")
    elif not folder.is_dir():
        problems.append(f"there is no folder {path.parent}; make it first")
    elif not os.access(folder, os.W_OK):
        problems.append(f"nothing may be written into {path.parent}; give a page another place")
    if problems:
        raise InputError("; ".join(problems), "missing-package" if missing else "file-unwritable")


def report_page(report: "Report", title: str = "") -> str:
    """The page of one comparison."""
    view = report_view(report)
    return page(title or "Comparison", [view], passed=report.passed, headline=view["headline"])


def suite_page(result: "SuiteResult") -> str:
    """The page of a suite: each case, those that did not pass open."""
    return cases_page([case_view(case) for case in result.cases], result.title)


def save_cases(cases: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], title: str = "Comparisons") -> Path:
    """Write the page of cases that `case_view` made; as `save_report`."""
    return written(Path(path), cases_page(cases, title))


def case_view(case: "CaseResult") -> dict[str, Any]:
    """A case as plain data, which may travel between processes as JSON."""
    state = "skipped" if case.skipped else "passed" if case.passed else "failed"
    said = case.skipped or case.error or ("refused by both sides, as it must be" if case.refused else "")
    report = report_view(case.report) if case.report else None
    return {"name": case.name, "state": state, "said": said, "report": report}


def cases_page(cases: Sequence[Mapping[str, Any]], title: str) -> str:
    ran = [case for case in cases if case["state"] != "skipped"]
    agree = sum(case["state"] == "passed" for case in ran)
    head = f"{agree} of {len(ran)} cases agree" if ran else "nothing ran"
    return page(title, [], passed=bool(ran) and agree == len(ran), headline=head, cases=cases)


def page(
    title: str, reports: Sequence[Mapping[str, Any]], *, passed: bool, headline: str, cases: Sequence[Mapping[str, Any]] = ()
) -> str:
    """A whole document."""
    drawn: dict[str, Any] = {}

    def numbered(view: Mapping[str, Any], number: int) -> dict[str, Any]:
        # Elements of the page are found by short names.
        if view["drawn"]:
            drawn[f"r{number}"] = view["drawn"]
        return {**view, "id": f"r{number}"}

    shown = [numbered(view, number) for number, view in enumerate(reports)]
    inside = [{**case, "report": case["report"] and numbered(case["report"], number)} for number, case in enumerate(cases)]
    return (
        templates()
        .get_template("page.html.j2")
        .render(
            title=title,
            headline=headline,
            passed=passed,
            reports=shown,
            cases=inside,
            drawn=drawn,
            style=(PAGE / "page.css").read_text(encoding="utf-8"),
            script=(PAGE / "page.js").read_text(encoding="utf-8"),
            plotly=plotly() if drawn else "",
        )
    )


def fragment(result: "Report | Trace | Diff | Transfer") -> str | None:
    """What a notebook shows: the words of a terminal, laid out; None, for which it shows the text, without jinja2."""
    if importlib.util.find_spec("jinja2") is None:
        return None
    template = templates().get_template("notebook.html.j2")
    style = (PAGE / "notebook.css").read_text(encoding="utf-8")
    return template.render(kind=type(result).__name__, style=style, **fragment_values(result))


def fragment_values(result: Any) -> dict[str, Any]:
    kind = type(result).__name__
    passed = result.passed
    if kind == "Report":
        return {"passed": passed, "headline": text.headline(result), "view": report_view(result), "body": str(result)}
    if kind == "Transfer":
        return {"passed": passed, "headline": sums(result), "plan": plan_view(result), "body": ""}
    lines = str(result).splitlines()
    return {"passed": passed, "headline": lines[0].strip(), "body": "\n".join(lines[1:])}


# --------------------------------------------------------------------------- one comparison


def report_view(report: "Report") -> dict[str, Any]:
    """All that the page of a comparison shows, in words and numbers."""
    tree = module_tree(report)
    faults = report.diagnosis.isolation.faults if report.diagnosis else ()
    found = report.trace.first_divergence() if report.trace else None
    return {
        "headline": text.headline(report),
        "passed": report.passed,
        "levels": [
            {"result": as_data(level), "sign": text.SIGNS[level.status], "proves": proves(level.level)}
            for level in report.levels
        ],
        "divergence": text.divergence_lines(found) if found else [],
        "wrong": text.wrong_modules(report.diagnosis.isolation) if report.diagnosis and faults else "",
        "faults": [fault_view(report, one) for one in faults],
        "next": next_step(report),
        "tree": node_view(tree) if tree else None,
        "modules": sum(1 for _ in tree.walk()) if tree else 0,
        "sets": [*(line.strip() for line in text.set_lines(report)), *filter(None, [text.modules_agree(report)])],
        "unpaired": list(report.trace.unpaired) if report.trace else [],
        "backward": [line.strip() for line in text.backward_lines(report.backward, EVERY)] if report.backward else [],
        "training": training_view(report.training) if report.training else None,
        "plan": plan_view(report.transfer) if report.transfer else None,
        "environment": dict(report.environment),
        "warnings": [as_data(one) for one in getattr(report.environment, "warnings", ())],
        "seed": report.seed,
        "notes": text.notes_of(report),
        "drawn": {**drawings(report, tree), **training_drawing(report.training)},
    }


def training_view(training: "Training") -> dict[str, Any]:
    """The verdict on a training, and its drift step by step, in the words and figures of the terminal."""
    from parity.report.training import columns, row, training_text

    return {
        "lines": training_text(training).splitlines(),
        "columns": columns(),
        "rows": [row(drift).split() for drift in training.drift],
    }


def training_drawing(training: "Training | None") -> dict[str, Any]:
    """What of a training is drawn: differences by step, and what counts as the same; nothing without steps."""
    if training is None or not training.drift:
        return {}
    drift = [[one.step, finite(one.gradients), finite(one.values), finite(abs(one.loss_difference))] for one in training.drift]
    losses = [finite(one.loss) for one in training.drift]
    native = [[one.step, finite(one.ratio)] for one in training.native]
    return {
        "training": {"drift": drift, "loss": losses, "native": native, "allowed": training.allowed, "first": training.first}
    }


def proves(level: str) -> str:
    from parity.evidence.result import PROVES

    return PROVES.get(level, "")


def next_step(report: "Report") -> str:
    """What to do, as the terminal has it; '' if there is nothing to do."""
    return text.next_step(report) or ""


def fault_view(report: "Report", one: "Isolated") -> dict[str, Any]:
    assert report.diagnosis is not None
    lines = text.isolated_lines(one)
    causes = report.diagnosis.causes_of(one.path)
    return {
        "path": one.path or "the model",
        "head": lines[0],
        "lines": [line.strip() for line in lines[1:]],
        "causes": [
            {"name": c.hypothesis, "what": c.what, "change": c.change, "fall": text.fall(c) + text.extent(c)} for c in causes
        ],
    }


def node_view(node: Node) -> dict[str, Any]:
    """A module for the tree."""
    ratio = node.ratio
    return {
        "name": node.name or "the model",
        "path": node.path,
        "mark": node.mark,
        "inside": node.worst_inside,
        "open": not node.path or node.worst_inside in ("wrong", "first divergence"),
        "ratio": times(ratio),
        "share": share(ratio),
        "over": ratio is not None and ratio > 1,
        "alone": node.alone,
        "lines": node_lines(node),
        "drawn": any(step.pictures for step in node.steps),
        "children": [node_view(child) for child in node.children],
    }


def node_lines(node: Node) -> list[str]:
    """What is known of a module, call by call."""
    lines = []
    for step in node.steps:
        lines += text.divergence_figures(step.divergence) if step.divergence else []
        lines += [step.note] if step.note else []
    for one in node.isolated:
        if one.status == "differs":
            lines += text.isolated_lines(one)
        elif one.note:
            lines.append(f"alone: {one.note}")
    lines += text.cause_lines(node.causes)
    return lines


def times(ratio: float | None) -> str:
    """An error over what rounding explains, in words."""
    if ratio is None:
        return ""
    return "no bound" if math.isinf(ratio) else f"{ratio:.2g}"


def share(ratio: float | None) -> int:
    """How full the bar of a module is, in percent."""
    if ratio is None or ratio <= 0:
        return 0
    return round(100 * min(1.0, max(0.02, (math.log10(min(ratio, 1e300)) - LEAST) / (MOST - LEAST))))


def plan_view(transfer: "Transfer") -> dict[str, Any]:
    """The rows of a transfer."""
    rows = [{"source": e.source, "target": e.target, "how": how(e)} for e in transfer.plan]
    return {"rows": rows, "sentences": list(coded_sentences(transfer)), "sums": sums(transfer), "problems": transfer.problems}


# --------------------------------------------------------------------------- numbers to draw


def drawings(report: "Report", tree: Node | None) -> dict[str, Any]:
    """What the page draws of the modules; nothing where no module was looked at."""
    steps = report.trace.steps if report.trace else ()
    if not steps or tree is None:
        return {}
    from parity.evidence.pictures import ERRORS

    return {
        "errors": [float(edge) for edge in ERRORS],
        "course": [[named_call(step), finite(step.ratio), step.agrees] for step in steps],
        "modules": {node.path: [drawing(s, p) for s in node.steps for p in s.pictures] for node in tree.walk()},
    }


def named_call(step: "Step") -> str:
    return (step.path or "the model") + (f", call {step.call + 1}" if step.call else "")


def drawing(step: "Step", picture: "Picture") -> dict[str, Any]:
    output = f"output {picture.output}" if picture.output else "output"
    return {
        "name": f"{output} of call {step.call + 1}" if step.call else output,
        "said": picture_sentence(picture),
        "histogram": picture.histogram,
        "magnitude": picture.by_magnitude,
        "axes": [f"axis {axis} of {len(picture.shape)}, length {picture.shape[axis]}" for axis in picture.axes],
        "map": picture.map,
    }


def picture_sentence(picture: "Picture") -> str:
    """A picture for those who do not see it."""
    from parity.evidence.pictures import ERRORS

    over = sum(picture.histogram[int((ERRORS < 0).sum()) + 1 :])
    elements = math.prod(picture.shape)
    largest = max((max(row) for row in picture.map), default=0.0)
    return (
        f"shape {picture.shape}: {picture.equal:,} of {elements:,} values bit-equal, {over:,} differ by more than rounding "
        f"explains, the largest {times(finite(largest))} times that"
    )


def finite(ratio: float) -> float:
    """JSON knows no infinity."""
    return ratio if math.isfinite(ratio) else 1e300


# --------------------------------------------------------------------------- packages


@lru_cache(maxsize=1)
def templates() -> Any:
    """The templates; every value is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def plotly() -> str:
    """The script that draws, whole."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
