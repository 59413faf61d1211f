"""For pytest: pairs under `@parity.pair` are tests, `parity_check` compares inside a test, `--parity-report` collects pages.

A failing pair reads like the report of the command line; no frame of a framework or of this package is shown.
"""

import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import parity
from parity import declared

# What the report of a test carries home from a worker, as text: workers send nothing else.
CARRIED = "parity_case"
LEVELS = ",".join(parity.LEVELS)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity", "is this Flax model the same function as that PyTorch model")
    group.addoption("--parity-device", choices=("cpu", "gpu"), default="cpu", help="where pairs are compared")
    group.addoption("--parity-levels", default="", metavar="NAMES", help=f"instead of a pair's own, some of {LEVELS}")
    group.addoption("--parity-seed", type=int, default=None, metavar="N", help="instead of a pair's own: of probes and jitter")
    group.addoption(
        "--parity-diagnose-seconds", type=float, default=None, metavar="N", help="how long causes are tried for a pair"
    )
    group.addoption(
        "--parity-update-golden", action="store_true", help="write golden bundles anew where models do something else now"
    )
    group.addoption("--parity-report", default="", metavar="FILE", help="write all comparisons of the run to one page")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "parity(**options): options of parity.compare for every parity_check in the test")
    try:
        if chosen_levels(config):
            declared.checked_levels(chosen_levels(config))
        if page_of(config):
            parity.html_ready(page_of(config))
    except parity.ParityError as error:
        raise pytest.UsageError(str(error)) from None
    if page_of(config) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Collector(config), "parity-report")


def page_of(config: pytest.Config) -> str:
    return config.getoption("--parity-report")


def chosen_levels(config: pytest.Config) -> tuple[str, ...] | None:
    return tuple(name.strip() for name in config.getoption("--parity-levels").split(",") if name.strip()) or None


def given_options(config: pytest.Config) -> dict[str, Any]:
    """Further options of `parity.compare` that the command line gives."""
    seconds = config.getoption("--parity-diagnose-seconds")
    return {} if seconds is None else {"diagnose_seconds": seconds}


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Versions, and what comparisons are made with; no framework is loaded for it."""
    versions = ", ".join(f"{name} {version}" for name, version in declared.versions().items())
    seed = config.getoption("--parity-seed")
    where = f"on {config.getoption('--parity-device')}, float32 products in full and TF32 off while comparing"
    return [f"parity: {versions}", f"parity: {where}, seed {'of each pair' if seed is None else seed}"]


# --------------------------------------------------------------------------- declared pairs


def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> Any:
    """A function under `@parity.pair` gives a test for each of its cases, whatever its name."""
    if not isinstance(collector, pytest.Module):
        return None
    if name == declared.REGISTER and (gone := declared.lost(vars(collector.obj))):
        raise collector.CollectError(gone)
    cases = declared.declarations(name, obj)
    return [PairItem.from_parent(collector, name=case.name, case=case) for case in cases] or None


class PairItem(pytest.Item):
    """One declared case."""

    def __init__(self, *, case: Any, **given: Any):
        super().__init__(**given)
        self.case = case
        self.add_marker("parity")
        self.result: parity.CaseResult | None = None

    def runtest(self) -> None:
        """Compare the pair.

        Raises:
            DivergenceError: it is not the same function.
            InputError: it cannot be compared.
        """
        device = self.config.getoption("--parity-device")
        absent = declared.gpu_missing() if device == "gpu" else ""
        if absent:
            pytest.skip(absent)
        seed = self.config.getoption("--parity-seed")
        self.result = declared.run_declared(self.case, chosen_levels(self.config), device, seed, given_options(self.config))
        if self.result.error:
            raise parity.InputError(self.result.error, self.result.code)
        assert self.result.report is not None
        self.result.report.raise_for_divergence()

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """The report alone."""
        return str(excinfo.value) if isinstance(excinfo.value, parity.ParityError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the function stands."""
        return self.path, self.case.function.__code__.co_firstlineno - 1, self.name


# --------------------------------------------------------------------------- inside a test


@pytest.fixture
def parity_check(request: pytest.FixtureRequest) -> Callable[..., parity.Report]:
    """Compare two models inside a test: `parity_check(torch_model, flax_model, *args, transfer=True, **options)`.

    Torch's parameters are copied into the Flax model first, unless `transfer=False`. Options are those of
    `parity.compare`; a marker `@pytest.mark.parity(...)` gives them for a whole test, the command line
    wins over both.

    Returns:
        The report, where the pair is the same function.

    Raises:
        DivergenceError: it is not.
        InputError: it cannot be compared as it stands.
    """
    config, node = request.config, request.node
    marked: dict[str, Any] = {}
    for marker in reversed(list(node.iter_markers("parity"))):
        marked |= marker.kwargs

    def check(torch_model: Any, flax_model: Any, *args: Any, **options: Any) -> parity.Report:
        __tracebackhide__ = True
        device = config.getoption("--parity-device")
        absent = declared.gpu_missing() if device == "gpu" else ""
        if absent:
            pytest.skip(absent)
        made = declared.Pair(torch_model, flax_model, *args, **(marked | options))
        try:
            seed = config.getoption("--parity-seed")
            report = declared.compared(made, chosen_levels(config), device, seed, given_options(config))
        except parity.ParityError as error:
            carry(node, error=str(error), code=error.code)
            raise error.with_traceback(None) from None
        carry(node, report=report)
        if not report.passed:
            raise parity.DivergenceError(str(report))
        return report

    return check


def carry(node: Any, **found: Any) -> None:
    """Keep for the page what a test compared, or why it could not."""
    setattr(node, CARRIED, [*getattr(node, CARRIED, []), found])


@pytest.fixture
def parity_golden(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Compare a model with its golden bundle: `parity_golden(model, *args, path=None, **options)`.

    The path is relative to the folder of the test file; without one it is `golden/FILE-TEST.safetensors` there, for a
    second call in one test `golden/FILE-TEST-2.safetensors`. Options are those of `parity.golden`. With
    `--parity-update-golden` the bundle is written anew, at once and whole, where the model does something else now.

    Returns:
        The report or the difference, where the model does what the bundle says.

    Raises:
        DivergenceError: it does not.
        InputError: it cannot be compared as it stands, or there is no bundle.
    """
    config, node = request.config, request.node
    calls = itertools.count(1)

    def check(model: Any, *args: Any, path: str | os.PathLike[str] | None = None, **options: Any) -> Any:
        __tracebackhide__ = True
        name = re.sub(r"[^\w.-]+", "-", f"{node.path.stem}-{node.name}").strip("-")
        number = next(calls) if path is None else 1
        own = Path("golden") / f"{name}{f'-{number}' if number > 1 else ''}.safetensors"
        place = node.path.parent / (path if path is not None else own)
        if chosen_levels(config):
            options["levels"] = chosen_levels(config)
        try:
            found = parity.golden(model, *args, path=place, update=config.getoption("--parity-update-golden"), **options)
        except parity.ParityError as error:
            carry(node, error=str(error), code=error.code)
            raise error.with_traceback(None) from None
        again = "" if isinstance(found, parity.Report) else "\n  accept it: pytest --parity-update-golden"
        told = f"golden bundle {place}\n{found}{again}"
        if isinstance(found, parity.Report):
            carry(node, report=found)
        elif not found.passed:
            carry(node, error=told, code="diverges")
        if not found.passed:
            raise parity.DivergenceError(told)
        return found

    return check


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    """Put what was compared on the report of the test, so that it comes home from a worker."""
    report = yield
    if call.when == "call" and page_of(item.config):
        cases = [item.result] if isinstance(item, PairItem) and item.result else []
        compared = getattr(item, CARRIED, [])
        for number, one in enumerate(compared):
            name = item.nodeid + (f" ({number + 1} of {len(compared)})" if len(compared) > 1 else "")
            cases.append(parity.CaseResult(name, item.name, item.config.getoption("--parity-device"), **one))
        setattr(report, CARRIED, [json.dumps(declared.case_view(case)) for case in cases])
    return report


class Collector:
    """Gathers the comparisons of all workers, and writes the page at the end."""

    def __init__(self, config: pytest.Config):
        self.config, self.cases, self.written = config, list[dict[str, Any]](), ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a test compared."""
        self.cases += [json.loads(text) for text in getattr(report, CARRIED, [])]

    def pytest_sessionfinish(self) -> None:
        """Write the page."""
        place = Path(os.path.abspath(page_of(self.config)))
        try:
            self.written = f"parity: page of {len(self.cases)} comparisons at {declared.save_cases(self.cases, place)}"
        except parity.ParityError as error:
            self.written = f"parity: {error}"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say where it is."""
        terminalreporter.write_line(self.written)
