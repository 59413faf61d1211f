"""The command line. Exit status 0: agreement. 1: divergence, or nothing proved. 2: misuse."""

import contextlib
import importlib
import importlib.metadata
import inspect
import io
import json
import operator
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table

import parity
from parity import declared

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
# Failing cases that are shown whole; the rest is in --json.
SHOWN = 3
# Below this many columns the table becomes one line for each module.
TABLE_WIDTH = 78


# Marks an error whose result has been printed as JSON.
PRINTED = "printed_as_json"
# Options of a comparison that `check` and `compare` share.
MODES = typer.Option(help="how Flax runs at the level native: compiled, eager or both")
STRICT = typer.Option("--strict", help="count it as a fault if one side refuses another dtype and the other does not")
DIAGNOSE = typer.Option("--diagnose/--no-diagnose", help="whether a failure is looked into: wrong modules and causes")
SECONDS = typer.Option(help="how long causes are tried, over all wrong modules of a pair")
SHOW_ENV = typer.Option("--show-env", help="print versions, devices and settings below the result")


def main() -> None:
    """Run the command line; an error is one message, and exit status 1 where two models do not fit, else 2.

    With --json the error is a document too, unless a result that says as much was printed before.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal or a pipe that lacks a letter gets an escape in its place, not the end of the run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(standalone_mode=True, prog_name="parity")
    except parity.ParityError as error:
        status = 1 if isinstance(error, parity.TransferError) else 2
        if "--json" in sys.argv and not getattr(error, PRINTED, False):
            with printing():
                print(json.dumps(parity.refusal(error, status), indent=1))
        print(f"parity: {error}", file=sys.stderr)
        sys.exit(status)


class Screen(Console):
    """A console that leaves it to `printing` what happens where the reader of a pipe has gone."""

    def on_broken_pipe(self) -> None:
        """Say so."""
        raise BrokenPipeError


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Print a result; where it cannot be printed, its exit status still stands.

    The reader of a pipe may have seen enough and gone; a disk may be full.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # What is still held goes nowhere, and does not fail again when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"parity: the result could not be printed: {error.strerror or error}", file=sys.stderr)


@contextlib.contextmanager
def aside(as_json: bool) -> Iterator[None]:
    """Let what code of the user's prints go beside a result that is one JSON document."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def show_version(asked: bool) -> None:
    """Print the version and stop."""
    if asked:
        print(f"parity {importlib.metadata.version('torch-flax-parity')}")
        raise typer.Exit


@app.callback()
def front(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="print the version")] = False,
) -> None:
    """Is this Flax model the same function as that PyTorch model, and if not, which line is wrong?"""


@app.command("check")
def check_command(
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="a Python file with functions under @parity.pair")] = "",
    device: Annotated[str, typer.Option(help="cpu, gpu or all")] = "cpu",
    levels: Annotated[str | None, typer.Option(help=f"some of {','.join(parity.LEVELS)}")] = None,
    module: Annotated[str, typer.Option(help="only modules or cases whose name contains this")] = "",
    full: Annotated[bool, typer.Option("--full", help="every dtype, eager and compiled, for every program and mask")] = False,
    seed: Annotated[int | None, typer.Option(help="of parameters, inputs, masks, probes and jitter")] = None,
    steps: Annotated[int, typer.Option(help="train every case for that many steps of AdamW too")] = 0,
    modes: Annotated[str, MODES] = "",
    strict: Annotated[bool, STRICT] = False,
    diagnose: Annotated[bool, DIAGNOSE] = True,
    diagnose_seconds: Annotated[float | None, SECONDS] = None,
    html: Annotated[str, typer.Option(help="write the result to this file too, as a page that needs no network")] = "",
    show_env: Annotated[bool, SHOW_ENV] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON and nothing else")] = False,
) -> None:
    """Prove level by level that the pairs of FILE are the same functions; without FILE the built-in wings.

    FILE is Python and is run: it declares pairs of your own by functions under @parity.pair.
    """
    chosen = None if levels is None else listed(levels)
    idle = [option for option, given in (("--full", full), ("--steps", steps)) if given]
    if file and idle:
        raise parity.InputError(f"{' and '.join(idle)} belong to the built-in suite; leave them out, or leave out FILE")
    options = given(modes=listed(modes), strict=strict, diagnose=diagnose, diagnose_seconds=diagnose_seconds)
    if options and not file:
        names = " and ".join(f"--{'no-' if value is False else ''}{name.replace('_', '-')}" for name, value in options.items())
        raise parity.InputError(f"{names} belong to pairs of your own; leave them out, or name a FILE")
    if html:
        # Before any work is done.
        parity.html_ready(html)
    console = Console(stderr=True)
    if not console.is_terminal and not as_json:
        print("comparing; most of a first run is compilation and takes about a minute", file=sys.stderr, flush=True)
    with progress_bar(console) as bar, aside(as_json):
        task = bar.add_task("starting", total=None)

        def advance(number: int, total: int, name: str) -> None:
            bar.update(task, completed=number, total=total, description=name.split("(", maxsplit=1)[0])

        shared: dict[str, Any] = dict(levels=chosen, module=module or None, device=device, progress=advance)
        if file:
            result = parity.check_file(file, seed=seed, options=options, **shared)
        else:
            result = parity.check(full=full, seed=seed or 0, steps=steps, **shared)
    with printing():
        if as_json:
            print(json.dumps(result.to_dict(), indent=1))
        else:
            show(result)
            if show_env:
                print(f"\n{result.environment}")
    if html:
        save_page(lambda: result.save_html(html))
    if not result.ran:
        raise typer.Exit(2)
    raise typer.Exit(0 if result.passed else 1)


def save_page(save: Callable[[], Path]) -> None:
    """Write a page and say where; the verdict stands whether it can be written or not."""
    try:
        print(f"page: {save()}", file=sys.stderr)
    except parity.InputError as error:
        print(f"parity: {error}", file=sys.stderr)


def listed(names: str) -> list[str]:
    """Names that stand between commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def given(*, modes: list[str], strict: bool, diagnose: bool, diagnose_seconds: float | None) -> dict[str, Any]:
    """The options that the command line gives, for `parity.compare`; those that it leaves to the pairs are left out."""
    options: dict[str, Any] = {"modes": modes} if modes else {}
    options |= {"strict": True} if strict else {}
    options |= {} if diagnose else {"diagnose": False}
    return options | ({} if diagnose_seconds is None else {"diagnose_seconds": diagnose_seconds})


def progress_bar(console: Console, *columns: ProgressColumn) -> Progress:
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(bar_width=24),
        *(columns or (MofNCompleteColumn(),)),
        TimeElapsedColumn(),
        console=console,
        # In a log, a bar would be one line for each frame.
        disable=not console.is_terminal,
        transient=True,
    )


def show(result: parity.SuiteResult) -> None:
    """The table, what was skipped, the first cases that failed, and the figures."""
    console = Screen()

    def say(text: str, style: str = "") -> None:
        # A terminal gets lines broken between words, a file gets them whole.
        console.print(escape(text), style=style, highlight=False, soft_wrap=not console.is_terminal)

    if console.width >= TABLE_WIDTH:
        console.print(levels_table(result))
    else:
        for name, cells in rows(result):
            say(f"{name}: " + ", ".join(f"{level} {text}" for level, text in zip(result.levels, cells, strict=True)))
    for case in result.cases:
        if case.skipped:
            say(f"skipped: {case.name}: {case.skipped}")
    failed = [case for case in result.ran if not case.passed]
    for case in failed[:SHOWN]:
        say(f"\n{case.name}", style="bold")
        say(case.error or str(case.report))
    if len(failed) > SHOWN:
        say(f"\nand {len(failed) - SHOWN} more cases; --json has them all")
    say(summary(result))


def levels_table(result: parity.SuiteResult) -> Table:
    """One row for each module and device: how many cases passed each level, of how many to which it applies."""
    # Wide enough for every name, narrow enough for 80 columns.
    table = Table(title=f"{escape(result.title)}\n", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("module", overflow="fold")
    for level in result.levels:
        table.add_column(level, justify="right")
    for name, cells in rows(result):
        table.add_row(name, *(text if complete(text) else f"[red]{text}[/red]" for text in cells))
    return table


def complete(text: str) -> bool:
    """Whether a cell says that all cases passed, or that there is nothing to pass."""
    passed, _, of = text.partition("/")
    return passed == of or not of


def rows(result: parity.SuiteResult) -> list[tuple[str, list[str]]]:
    """For each module and device: how many cases passed each level, of how many to which it applies."""
    groups: dict[tuple[str, str], list[parity.CaseResult]] = {}
    for case in result.cases:
        groups.setdefault((case.module, case.device), []).append(case)
    found = []
    for (module, device), cases in groups.items():
        ran = [case for case in cases if not case.skipped]
        cells = [cell(ran, level) if ran else "skipped" for level in result.levels]
        found.append((module if device == "cpu" else f"{module} on {device}", cells))
    return found


def cell(cases: list[parity.CaseResult], level: str) -> str:
    found = [r for case in cases if case.report for r in case.report.levels if r.level == level]
    applies = [r for r in found if r.status != "not applicable"]
    # A case that could not be compared has passed nothing.
    of = len(applies) + sum(bool(case.error) for case in cases)
    return f"{sum(r.passed for r in applies)}/{of}" if of else "n/a"


def summary(result: parity.SuiteResult) -> str:
    """The verdict in one line, then the figures and what they were measured with."""
    figures, ran = result.figures(), result.ran
    passed = sum(case.passed for case in ran)
    refused = sum(case.refused for case in ran)
    head = f"{passed} of {len(ran)} cases agree" if ran else "nothing ran"
    lines = [f"\n{head} in {result.seconds:.1f} s, seed {result.seed}"]
    if refused:
        lines.append(f"{refused} of them refused by both sides, as they must be")
    if figures["elements"]:
        lines.append(
            f"identical: {figures['equal']:,} of {figures['elements']:,} output values bit-equal in float32, "
            f"{figures['ties']} proved rounding ties, {figures['cancelled']} below float64's own noise, "
            f"{figures['unexplained']} unexplained"
        )
    settings = result.environment
    names = ("torch", "jax", "flax", "torch devices", "jax devices", "torch float32 products", "jax matmul precision")
    lines.append(", ".join(f"{name} {settings[name]}" for name in names if name in settings))
    return "\n".join(lines)


@app.command("compare")
def compare_command(
    case: Annotated[
        str, typer.Argument(metavar="FILE[::CASE]", help="a Python file, and the function in it under @parity.pair")
    ],
    device: Annotated[str, typer.Option(help="cpu or gpu")] = "cpu",
    levels: Annotated[str | None, typer.Option(help=f"some of {','.join(parity.LEVELS)}")] = None,
    seed: Annotated[int | None, typer.Option(help="of probes, cotangents and jitter")] = None,
    modes: Annotated[str, MODES] = "",
    strict: Annotated[bool, STRICT] = False,
    diagnose: Annotated[bool, DIAGNOSE] = True,
    diagnose_seconds: Annotated[float | None, SECONDS] = None,
    html: Annotated[str, typer.Option(help="write the report to this file too, as a page that needs no network")] = "",
    show_env: Annotated[bool, SHOW_ENV] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON and nothing else")] = False,
) -> None:
    """Tell whether one pair of your own is the same function, and if not, where they part and why."""
    chosen = None if levels is None else listed(levels)
    if html:
        parity.html_ready(html)
    file, _, name = case.partition("::")
    options = given(modes=listed(modes), strict=strict, diagnose=diagnose, diagnose_seconds=diagnose_seconds)
    with aside(as_json):
        result = parity.check_file(file, levels=chosen, module=name or None, device=device, seed=seed, options=options)
    names = [one.name for one in result.cases]
    if len(names) > 1:
        said = f"{case} means {len(names)} cases; name one: {', '.join(f'{file}::{n}' for n in names)}"
        raise parity.InputError(said, "no-such-case")
    one = result.cases[0]
    report = one.report
    if report is None:
        raise parity.InputError(one.error or one.skipped, one.code or "no-device")
    told(report, html, one.name, as_json, show_env)


@app.command("transfer")
def transfer_command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="a checkpoint: a file or folder")],
    target: Annotated[str, typer.Argument(metavar="DST", help="the checkpoint to write; its end says the kind")],
    like: Annotated[str, typer.Option(help="whose names, shapes and dtypes: a checkpoint, or module:function")] = "",
    key: Annotated[str, typer.Option(help="which weights, where SRC holds several: such as ema, or state_dict.model")] = "",
    plan: Annotated[bool, typer.Option("--plan", help="only show what would be done")] = False,
    rename: Annotated[
        str, typer.Option(help="a JSON file from names, also of slices, to names and layouts on the other side")
    ] = "",
    save_rename: Annotated[str, typer.Option(help="write the paired names, and suggestions, to a JSON file to be edited")] = "",
    ignore: Annotated[list[str] | None, typer.Option(help="leave out what fits this pattern, such as 'optimizer.*'")] = None,
    cast: Annotated[str, typer.Option(help="round to a dtype such as bfloat16, or to the target's: target")] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace what exists")] = False,
    merge: Annotated[
        list[str] | None, typer.Option(help="send what torch computes from several arrays: weight_norm, lora=2.0, ..., all")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="read the result back and compare it bit for bit")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print nothing but errors")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON and nothing else")] = False,
) -> None:
    """Convert a checkpoint: .safetensors, shards with an index, .pt, .msgpack or Orbax, under PyTorch's or Flax's names.

    Between PyTorch's names and Flax's a file alone does not tell which arrays are transposed; --like does.
    Exit status 0: done; 1: source and target do not fit, and nothing was written; 2: misuse.
    """
    if save_rename:
        check_place(Path(save_rename), overwrite)
    with aside(as_json):
        wanted = named(like)
    with unwinding(), LateBar(shown=not (quiet or as_json)) as bar:
        try:
            result = parity.transfer(
                source,
                target,
                like=wanted,
                key=key,
                rename=rename or None,
                ignore=ignore or (),
                cast=cast or None,
                overwrite=overwrite,
                verify=verify,
                merge=merge or (),
                dry=plan,
                progress=bar.advance,
            )
        except parity.TransferError as error:
            if error.plan:
                save_names(save_rename, error.plan)
                if as_json:
                    print(json.dumps(error.plan.to_dict(), indent=1))
                    setattr(error, PRINTED, True)
            raise
    save_names(save_rename, result)
    with printing():
        if as_json:
            print(json.dumps(result.to_dict(), indent=1))
        elif not quiet:
            console = Screen()
            print(result.text(console.width if console.is_terminal else None))
    raise typer.Exit(0 if result.passed else 1)


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Let the signal by which batch systems end a process be an exception, so that what is half written is taken away."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class LateBar:
    """A bar of bytes for work that takes long; nothing where no one is looking."""

    # Seconds without a bar.
    PATIENCE = 1.0

    def __init__(self, shown: bool):
        console = Console(stderr=True)
        self.shown = shown and console.is_terminal
        self.bar = progress_bar(console, DownloadColumn(), TransferSpeedColumn())
        self.task = self.bar.add_task("", total=None)
        self.begin = time.monotonic()

    def advance(self, done: int, total: int, name: str) -> None:
        """Show how far the work is."""
        if self.shown and time.monotonic() - self.begin > self.PATIENCE:
            self.bar.start()
        self.bar.update(self.task, completed=done, total=total, description=name[-28:])

    def __enter__(self) -> "LateBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def check_place(path: Path, overwrite: bool) -> None:
    """Refuse a place for the rename file before any work is done."""
    if path.exists() and not overwrite:
        raise parity.InputError(f"{path} exists; pass --overwrite to replace it, or give another name", "file-exists")
    if not path.parent.is_dir():
        raise parity.InputError(f"there is no folder {path.parent}; make it first", "file-unwritable")


def save_names(path: str, result: parity.Transfer) -> None:
    """Write the names that were paired, and suggestions for others, to be edited."""
    if not path:
        return
    if not result.draft:
        print(f"parity: {path} was not written: no name fits one of the other side, and none is near to one", file=sys.stderr)
        return
    try:
        Path(path).write_text(json.dumps(result.draft, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        said = f"{path} could not be written: {error.strerror}; give another name"
        raise parity.InputError(said, "file-unwritable") from error


def named(like: str, option: str = "--like ", wanted: str = "model") -> Any:
    """A path as it is; of `module:name` what is found there, called if it is a function or class.

    Raises:
        InputError: there is nothing, or it raises.
    """
    if ":" not in like or Path(like).exists():
        return like or None
    module, _, name = like.partition(":")
    # As python -m has it: modules in the folder where the command was given.
    sys.path.insert(0, os.getcwd())
    try:
        found = operator.attrgetter(name)(importlib.import_module(module))
        return found() if inspect.isroutine(found) or inspect.isclass(found) else found
    except parity.MissingFrameworkError:
        raise
    except (Exception, SystemExit) as error:
        # Code that ends the process would otherwise end it with the status of an agreement.
        do = "mend it there" if declared.users_line(error) else "name a function without arguments"
        do = "install it, or name code that does without" if isinstance(error, ModuleNotFoundError) else do
        code = "misuse" if option == "--args " else "no-model"
        said = f"{option}{like} gives no {wanted} ({declared.raised(error)}); {do}"
        raise parity.InputError(said, code) from error
    finally:
        sys.path.remove(os.getcwd())


@app.command("record")
def record_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="module:name of a model, or of a function that makes one")],
    path: Annotated[str, typer.Argument(metavar="FILE", help="the .safetensors file to write")],
    args: Annotated[str, typer.Option(help="module:name of the arguments: a tuple, a dict of keywords, or parity.InputSet's")],
    keep: Annotated[str, typer.Option(help="all, summaries or digests")] = "all",
    seed: Annotated[int, typer.Option(help="of cotangents, probes and jitter")] = 0,
    gradients: Annotated[bool, typer.Option("--gradients/--no-gradients", help="whether gradients are recorded")] = True,
    dropout: Annotated[bool, typer.Option("--dropout", help="record a torch model in train mode, with its masks")] = False,
) -> None:
    """Write down what a model of either framework does; only that framework need be installed.

    MODEL and --args are Python, found in the current folder, and are run.
    """
    given = python_name(args, "--args", "arguments")
    options: dict[str, Any] = {"keep": keep, "seed": seed, "gradients": gradients, "path": path}
    options["dropout"] = "replay" if dropout else None
    made = python_name(model, "MODEL", "model")
    if isinstance(given, dict):
        found = parity.record(made, kwargs=given, **options)
    else:
        found = parity.record(made, *(given if isinstance(given, tuple) else (given,)), **options)
    print(f"{found}: {found.stat().st_size:,} bytes", file=sys.stderr)


@app.command("replay")
def replay_command(
    path: Annotated[str, typer.Argument(metavar="FILE", help="a bundle that parity record wrote")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="module:name of a model of the other framework")],
    levels: Annotated[str | None, typer.Option(help=f"some of {','.join(parity.LEVELS)}")] = None,
    rename: Annotated[str, typer.Option(help="a JSON file from torch's names to Flax's")] = "",
    ignore: Annotated[list[str] | None, typer.Option(help="leave out what fits this pattern, such as 'head.*'")] = None,
    html: Annotated[str, typer.Option(help="write the report to this file too, as a page that needs no network")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON and nothing else")] = False,
) -> None:
    """Tell whether a model is the same function as the recorded one of the other framework, which need not be installed.

    MODEL is Python, found in the current folder, and is run.
    """
    chosen = None if levels is None else listed(levels)
    if html:
        parity.html_ready(html)
    with aside(as_json):
        made = python_name(model, "MODEL", "model")
        report = parity.replay(path, made, levels=chosen, rename=rename or None, ignore=ignore or ())
    told(report, html, Path(path).stem, as_json)


@app.command("diff")
def diff_command(
    expected: Annotated[str, typer.Argument(metavar="A", help="a bundle")],
    actual: Annotated[str, typer.Argument(metavar="B", help="another one, on the same arguments")],
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON and nothing else")] = False,
) -> None:
    """Compare two bundles; no framework need be installed.

    Two of one framework leaf by leaf, A being expected; one of torch and one of Flax as a pair.
    """
    told(parity.bundle_diff(expected, actual), "", "", as_json)


def told(result: Any, html: str, title: str, as_json: bool, show_env: bool = False) -> None:
    """Print a result, write its page, and end with its status."""
    with printing():
        print(json.dumps(result.to_dict(), indent=1) if as_json else result.text(environment=True) if show_env else result)
    if html:
        save_page(lambda: result.save_html(html, title=title))
    raise typer.Exit(0 if result.passed else 1)


def python_name(text: str, option: str, wanted: str) -> Any:
    """What `module:name` means.

    Raises:
        InputError: it is of another form, or gives nothing.
    """
    if ":" not in text:
        raise parity.InputError(f"{option} must be module:name, such as my_models:build, got {text!r}", "misuse")
    return named(text, f"{option} ", wanted)


@app.command("levels")
@printing()
def levels_command() -> None:
    """What each level of the ladder proves."""
    table = Table(show_header=False, box=None)
    for level, meaning in parity.PROVES.items():
        table.add_row(level, meaning)
    Screen().print(table)


@app.command("rules")
@printing()
def rules_command(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """The ledger: each layer of torch, its counterpart in Flax, how its arrays lie there, and what must agree."""
    if as_json:
        print(json.dumps(parity.rules_document(), indent=1))
        return
    console = Screen()
    for rule in parity.rules():
        names = f"{rule.torch} <-> {rule.flax}{', ' if rule.linen else ''}{rule.linen}"
        console.print(names, style="bold", highlight=False, soft_wrap=True)
        table = Table(show_header=False, box=None, padding=(0, 1, 0, 2))
        for leaf in rule.leaves:
            when = f", where {leaf.when[0]}={leaf.when[1]!r}" if leaf.when else ""
            table.add_row(escape(leaf.torch), escape(leaf.flax), escape(leaf.layout.name + when))
        for alone in rule.alone:
            table.add_row(escape(alone.torch), "-", alone.fate)
        console.print(table)
        if rule.settings:
            console.print(f"  agree: {escape('; '.join(map(str, rule.settings)))}", highlight=False, soft_wrap=True)
    console.print("layouts that rename may name: 'q_proj.weight' -> 'q.kernel | rotary(8)'", style="bold", highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 2))
    for name, meaning in parity.layout_names().items():
        table.add_row(escape(name), escape(meaning))
    console.print(table)


@app.command("env")
@printing()
def env_command(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Versions, devices and settings, what is missing and how to install it, and what is known to go wrong."""
    found = parity.environment()
    console = Screen()
    print(json.dumps(found.to_dict(), indent=1) if as_json else found.text(console.width if console.is_terminal else None))


@app.command("schema")
@printing()
def schema_command() -> None:
    """The JSON schema of all that --json and to_dict() give."""
    print(json.dumps(parity.schema(), indent=1))


@app.command("codes")
@printing()
def codes_command(
    kind: Annotated[str, typer.Argument(help="only codes of this kind, such as refusal")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="print the page of the documentation")] = False,
) -> None:
    """Every code that a result or an error may have, and what it means."""
    if markdown:
        print(parity.codes_page(), end="")
        return
    found = parity.codes(kind or None)
    if as_json:
        print(json.dumps(parity.codes_document(found), indent=1))
        return
    for one in found:
        print(f"{one.kind}: {one.code}: {one.meaning}")


if __name__ == "__main__":
    main()
