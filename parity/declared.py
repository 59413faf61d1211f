"""Pairs of models that a user declares once, for the command line and for pytest alike."""

import contextlib
import importlib.util
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from parity.errors import InputError, ParityError, first_line, raised, users_line
from parity.evidence.compare import checked_levels, compare
from parity.frameworks import load, load_both
from parity.linen import Linen
from parity.report.html import case_view, save_cases
from parity.suite import CaseResult, SuiteResult, no_gpu
from parity.surroundings import environment, versions
from parity.weights.transfer import transfer

# What the faces of the product need, and users do not.
__all__ = [
    "REGISTER",
    "case_view",
    "checked_levels",
    "compared",
    "declarations",
    "gpu_missing",
    "lost",
    "raised",
    "run_declared",
    "save_cases",
    "users_line",
    "versions",
]

Function = TypeVar("Function", bound=Callable[..., Any])

# Under this name a function carries its declaration, and under this one a module all functions that were declared in it.
MARK, REGISTER = "__parity_pair__", "__parity_pairs__"
# What a declaration may set, besides what the run sets for all pairs.
OPTIONS = tuple(name for name, p in inspect.signature(compare).parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY)
# What a transfer takes too.
SHARED = ("rename", "ignore")


class Pair:
    """A torch model, its port, and the arguments on which they are to be the same function.

    Args:
        torch_model: as in `parity.compare`.
        flax_model: as in `parity.compare`.
        args: as in `parity.compare`.
        transfer: whether torch's parameters are copied into the Flax model first; False compares the
            parameters that it has.
        options: every other keyword of `parity.compare`.

    Raises:
        InputError: `parity.compare` has no such option.
    """

    def __init__(self, torch_model: Any, flax_model: Any, *args: Any, transfer: bool = True, **options: Any):
        known_options(options, "parity.Pair")
        self.torch_model, self.flax_model, self.args = torch_model, flax_model, args
        self.transfer, self.options = transfer, options

    def __repr__(self) -> str:
        flax = self.flax_model.module if isinstance(self.flax_model, Linen) else self.flax_model
        return f"parity.Pair({type(self.torch_model).__name__}, {type(flax).__name__})"


def known_options(options: Mapping[str, Any], whose: str) -> None:
    """Refuse what `parity.compare` does not take.

    Raises:
        InputError: there is something.
    """
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise InputError(f"{whose} has no option {', '.join(unknown)}; parity.compare has {', '.join(OPTIONS)}")


@dataclass(frozen=True)
class Declared:
    """A function that makes a pair, and the arguments with which it is called.

    Attributes:
        name: of the case: the function's in its module, with that of the arguments in brackets.
        function: returns a `Pair`.
        arguments: keyword arguments for it.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    @property
    def row(self) -> str:
        """What the cases of one function are told under."""
        return self.name.partition("[")[0]


def pair(function: Function | None = None, *, each: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """Declare that a function returns a `Pair`, so that `parity check FILE` and pytest find it.

    Args:
        function: that is decorated; the decorator stands with or without brackets.
        each: keyword arguments for the function by the name of a case; one case for each. None is one
            case without arguments.

    Raises:
        InputError: `each` is empty, or is no dict of dicts.
    """
    if each is not None and (not each or not all(isinstance(given, Mapping) for given in each.values())):
        raise InputError(f"each must be a dict from names of cases to keyword arguments, got {each!r}")

    def marked(target: Function) -> Function:
        setattr(target, MARK, dict(each) if each is not None else {"": {}})
        getattr(target, "__globals__", {}).setdefault(REGISTER, []).append(target)
        return target

    return marked if function is None else marked(function)


def declarations(name: str, function: Any) -> list[Declared]:
    """The cases of one function, by its name in a module; none if it was not declared."""
    cases = getattr(function, MARK, None)
    if not isinstance(cases, dict):
        return []
    return [Declared(name + (f"[{case}]" if case else ""), function, arguments) for case, arguments in cases.items()]


def imported(module: str, function: Any) -> bool:
    """Whether a declared function has a name in another module than this one: there it is found."""
    home = getattr(function, "__module__", module)
    return home != module and getattr(sys.modules.get(home), getattr(function, "__name__", ""), None) is function


def lost(known: Mapping[str, Any]) -> str:
    """What a module declares and has under no name, so that it would never be compared; '' if there is nothing."""
    reached = {id(one) for value in known.values() for one in unwrapped(value)}
    gone = [target for target in known.get(REGISTER, ()) if id(target) not in reached]
    if not gone:
        return ""
    told = dict.fromkeys(f"{target.__name__} in line {target.__code__.co_firstlineno}" for target in gone)
    return f"{', '.join(told)} would not be compared: no name of the file holds it, or a later one took it; name each its own"


def unwrapped(value: Any) -> Iterator[Any]:
    """A function, and those that it wraps."""
    while value is not None:
        yield value
        value = getattr(value, "__wrapped__", None) if inspect.isroutine(value) else None


def found_in(path: Path) -> list[Declared]:
    """The cases that a file declares, in its order.

    Raises:
        InputError: there is no such file, it raises, it declares nothing, or something that has no name.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}; name a Python file with functions under @parity.pair", "file-missing")
    name = f"_parity_cases_{abs(hash(str(path.resolve())))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise InputError(f"{path} is no Python file; its name must end with .py", "file-unreadable")
    module = importlib.util.module_from_spec(spec)
    # As `python FILE` has it: modules beside the file.
    with beside_on_path(path.resolve().parent):
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except ParityError as error:
            raise InputError(f"{path}: {error}", "cases-file-raises") from error
        except (Exception, SystemExit) as error:
            # A file that ends the process would otherwise end the run with its own exit status.
            raise InputError(
                f"{path} raises {type(error).__name__}: {first_line(error)} ({place(error, path)})", "cases-file-raises"
            ) from error
    if gone := lost(vars(module)):
        raise InputError(f"{path}: {gone}", "cases-file-loses")
    pairs = {key: value for key, value in vars(module).items() if hasattr(value, MARK) and not imported(name, value)}
    found = [case for key, value in pairs.items() for case in declarations(key, value)]
    if not found:
        raise InputError(
            f"{path} declares no pair: put @parity.pair above a function that returns a parity.Pair", "cases-file-empty"
        )
    return found


@contextlib.contextmanager
def beside_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def place(error: BaseException, path: Path | None = None) -> str:
    """Where the user's own code raised: its innermost line in one file, or outside of installed packages."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if (f.filename == str(path) if path else "site-packages" not in f.filename)]
    found = mine or list(frames)
    return f"{found[-1].filename}:{found[-1].lineno}" if found else "no line is known"


def run_declared(
    case: Declared,
    levels: tuple[str, ...] | None = None,
    device: str = "cpu",
    seed: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> CaseResult:
    """One case, whatever happens in it.

    Args:
        case: the case.
        levels: instead of those that the case asks for.
        device: `cpu` or `gpu`.
        seed: instead of the one that the case asks for.
        options: other keywords of `parity.compare`, instead of those that the case gives.
    """
    start = time.perf_counter()

    def result(**found: Any) -> CaseResult:
        return CaseResult(case.name, case.row, device, seconds=time.perf_counter() - start, **found)

    try:
        made = case.function(**case.arguments)
    except ParityError as error:
        return result(error=str(error), code=error.code)
    except (Exception, SystemExit) as error:
        said = f"the function raises {type(error).__name__}: {first_line(error)} ({place(error)})"
        return result(error=said, code="pair-raises")
    if not isinstance(made, Pair):
        return result(error=f"the function must return a parity.Pair, got {type(made).__name__}", code="pair-raises")
    try:
        return result(report=compared(made, levels, device, seed, options))
    except ParityError as error:
        return result(error=str(error), code=error.code)
    except Exception as error:
        # The other cases are not lost for it.
        return result(error=f"comparing it raises {raised(error)}", code="pair-raises")


def compared(
    made: Pair,
    levels: tuple[str, ...] | None = None,
    device: str = "cpu",
    seed: int | None = None,
    given: Mapping[str, Any] | None = None,
) -> Any:
    """The report of a pair; what the run gives wins over what the pair does.

    Raises:
        InputError: its parameters do not fit, or it cannot be compared as it stands.
    """
    options = {**made.options, **(given or {})}
    if levels is not None:
        options["levels"] = levels
    if seed is not None:
        options["seed"] = seed
    torch_model, flax_model = made.torch_model, made.flax_model
    if device == "gpu":
        torch_model = torch_model.to("cuda")
    with load("nnx").on_device(device):
        if made.transfer:
            shared = {name: options[name] for name in SHARED if options.get(name) is not None}
            flax_model = transfer(torch_model, flax_model, **shared).value
        return compare(torch_model, flax_model, *made.args, **options)


def check_file(
    path: str | os.PathLike[str],
    *,
    levels: Any = None,
    module: str | None = None,
    device: str = "cpu",
    seed: int | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> SuiteResult:
    """Run every pair that a file declares by `parity.pair`.

    Args:
        path: of a Python file. It is run, as `python FILE` would run it.
        levels: instead of those that each case asks for.
        module: only cases whose name contains this, whatever the case of its letters; a whole name means that case alone.
        device: `cpu`, `gpu` or `all`. A missing device gives a skipped row that says why.
        seed: instead of the one that each case asks for.
        options: other keywords of `parity.compare`, such as `diagnose_seconds`, instead of those that each case gives.
        progress: called before each case with its number, how many there are, and its name.

    Returns:
        One result for each case.

    Raises:
        InputError: the file cannot be used, no case is called like `module`, or there is no such level or device.
        MissingFrameworkError: a framework is not installed.
    """
    chosen, path = None if levels is None else checked_levels(levels), Path(path)
    known_options(options or {}, "check_file")
    load_both()
    cases = found_in(path)
    if module:
        names = [case.name for case in cases]
        named = [case for case in cases if case.name == module]
        cases = named or [case for case in cases if module.lower() in case.name.lower()]
        if not cases:
            raise InputError(f"no case of {path} is called like {module!r}; there are {', '.join(names)}", "no-such-case")
    if device not in ("cpu", "gpu", "all"):
        raise InputError(f"device must be cpu, gpu or all, got {device!r}", "no-device")
    start, results = time.perf_counter(), list[CaseResult]()
    for d in [d for d in ("cpu", "gpu") if device in (d, "all")]:
        absent = gpu_missing() if d == "gpu" else ""
        if absent:
            results.append(CaseResult(f"all cases on {d}", "all cases", d, skipped=absent))
            continue
        for number, case in enumerate(cases):
            if progress:
                progress(number, len(cases), case.name)
            results.append(run_declared(case, chosen, d, seed, options))
    first = next((r.report for r in results if r.report), None)
    shown = chosen or tuple(dict.fromkeys(level.level for r in results if r.report for level in r.report.levels))
    found = first.environment if first else environment()
    return SuiteResult(tuple(results), shown, seed or 0, time.perf_counter() - start, found, str(path))


def gpu_missing() -> str:
    """Why no GPU can be used by both frameworks, '' if one can."""
    return no_gpu(load("torch"), load("nnx"))
