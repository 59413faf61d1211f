"""Climb the ladder for a pair of models."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from parity.errors import InputError, NotRecordedError, raised, users_line
from parity.evidence.backward import isolate_backward
from parity.evidence.diagnose import SECONDS, checked_seconds, diagnose_subject
from parity.evidence.dropping import replayed
from parity.evidence.ids import check_ids
from parity.evidence.input_sets import InputSet, climbed, given_sets
from parity.evidence.ladder import CLIMB, numbers
from parity.evidence.lints import lint
from parity.evidence.made_good import made_good
from parity.evidence.notes import Note
from parity.evidence.result import LEVELS, TRAINING, Finding, LevelResult, Report
from parity.evidence.subject import Subject
from parity.evidence.trace import trace_subject
from parity.evidence.unseen import flushed, unreached, unseen_parameters
from parity.surroundings import Environment, surroundings
from parity.training.level import Plan, planned, training
from parity.training.recipe import Recipe
from parity.weights.transfer import as_planned

Made = TypeVar("Made")


def compare(
    torch_model: Any,
    flax_model: Any,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    levels: Iterable[str] | None = None,
    modes: Iterable[str] = ("compiled", "eager"),
    rename: Mapping[str, str] | None = None,
    ignore: Iterable[str] = (),
    seed: int = 0,
    strict: bool = False,
    diagnose: bool = True,
    diagnose_seconds: float = SECONDS,
    dropout: str | None = None,
    padding_mask: Any = None,
    steps: int = 0,
    optimizer: Any = None,
    loss: Any = None,
    batches: Iterable[Sequence[Any]] | None = None,
    recipe: Recipe | None = None,
) -> Report:
    """Tell whether a Flax model is the same function as a torch model, level by level.

    While it runs, float32 products are full, TF32 is off, torch's algorithms are
    deterministic, and jax has 64-bit types inside float64 runs only; all of it is restored
    afterwards. Neither model nor any argument is changed.

    Args:
        torch_model: a `torch.nn.Module` in eval mode, unless `dropout` says otherwise. Canonical: what it does is right.
        flax_model: an `nnx.Module` in eval mode, or a `parity.Linen`.
        args: positional arguments for both: tensors, arrays or NumPy, in the dtype of the models; or one
            `InputSet`, or one list of them, such as `parity.probe_inputs` makes. Of several sets every one is
            compared, and the first that fails is traced and diagnosed.
        kwargs: keyword arguments for both.
        levels: names out of `weights`, `structure`, `wiring`, `identical`, `native`, `gradients`;
            None climbs them all. `training` is climbed where there are steps.
        modes: how Flax runs at the level `native`: `compiled`, `eager` or both.
        rename: as in `parity.transfer`.
        ignore: as in `parity.transfer`.
        seed: of probes, cotangents and jitter.
        strict: whether refusing another dtype is part of the interface: torch does, most Flax
            layers promote.
        diagnose: whether a failure is looked into: every pair of modules run alone, and for those
            that differ the causes tried. Costs about as much as `parity.diagnose`; a passing comparison
            costs nothing more.
        diagnose_seconds: how long causes are tried, over all wrong modules, as `seconds` of `parity.diagnose`.
        dropout: None refuses models that drop; `replay` takes them in train mode, and lets both drop by the masks
            that torch draws for `seed`. How they drop is part of the level `structure` then; the level `wiring`,
            inputs that do not fit and the diagnosis are left out. Batch norms must be in eval mode.
        padding_mask: True where an output's first axes are padding, such as (batch, length); it belongs to
            every output whose shape begins so. A mapping from output paths gives each its own. Outputs are
            compared outside of it; the report says so, and whether they differ inside.
        steps: to train copies of both, put into train mode, after the other levels: in float64 from the same
            state, and in their own dtype each step from torch's state, with torch's dropout masks.
        optimizer: with `steps`; as in `parity.train_both`, and so `loss`.
        loss: with `steps`.
        batches: of the training; they are taken in turn, anew from the first if there are fewer than it takes. None
            trains on the arguments: the last is the target, if the loss has one. The other levels give the models every
            argument, so that beside them a loss with a target needs batches.
        recipe: what else happens in a step of training.

    Returns:
        The report; on failure with a trace that names the first divergence, and with a diagnosis.

    Raises:
        InputError: a model or an argument cannot be compared as it stands, both models refuse it (its `code`
            is 'both sides raise') or return nothing ('nothing returned'), ids are out of range, or a model
            returns other numbers, or raises, when it is run again ('not repeatable').
        MissingFrameworkError: a framework is not installed.
    """
    drops, ways = replays(dropout), checked_modes(modes)
    seconds = checked_seconds(diagnose_seconds, "diagnose_seconds")
    below = [name for name in LEVELS if name != "wiring"] if drops and levels is None else levels
    chosen, plan = checked_levels(below, bool(steps)), None
    sets = given_sets(args, kwargs)
    if steps or (optimizer, loss, batches, recipe) != (None,) * 4:
        # That the two are models at all is said below, for every level.
        options: dict[str, Any] = {"optimizer": optimizer, "loss": loss, "batches": batches, "recipe": recipe}
        known: dict[str, Any] = {"rename": rename, "ignore": ignore}
        plan = planned(torch_model, flax_model, sets[0].args, sets[0].kwargs, steps=steps, **known, **options)

    def climb_one(one: InputSet, first: bool, explain: bool) -> Report:
        subject = Subject(
            torch_model,
            flax_model,
            one.args,
            one.kwargs,
            rename=rename,
            ignore=(ignore,) if isinstance(ignore, str) else tuple(ignore),
            seed=seed,
            gradients="gradients" in chosen,
            dropout=drops,
            padding_mask=padding_mask,
        )
        # The weights are the same whatever the inputs are.
        wanted = chosen if first else tuple(level for level in chosen if level != "weights")
        if not drops:
            return climb(subject, wanted, ways, strict, diagnose=diagnose and explain, trace=explain, seconds=seconds)
        with replayed(subject):
            return climb(subject, wanted, ways, strict, spoil=False, diagnose=False, trace=explain)

    report = climbed(sets[:1] if chosen == ("weights",) else sets, climb_one)
    return report if plan is None else with_training(report, plan)


def with_training(report: Report, plan: Plan) -> Report:
    """The same with the level `training`; each of its steps has dropout masks of its own."""
    refused = next((level for level in report.levels if level.figures.get("raises")), None)
    if refused is not None:
        return replace(report, levels=(*report.levels, LevelResult(TRAINING, "not run", refused.findings[0].what)))
    result, trained = training(plan)
    return replace(report, levels=(*report.levels, result), training=trained)


def climb(
    subject: Subject,
    levels: tuple[str, ...],
    modes: tuple[str, ...],
    strict: bool = False,
    spoil: bool = True,
    diagnose: bool = True,
    trace: bool = True,
    seconds: float = SECONDS,
) -> Report:
    """`compare` for models that are already checked.

    Args:
        subject: the pair and its call.
        levels: in the ladder's order.
        modes: as in `compare`.
        strict: as in `compare`.
        spoil: whether inputs that do not fit are tried too.
        diagnose: as in `compare`.
        trace: whether a failure is traced.
        seconds: as `diagnose_seconds` in `compare`.
    """
    running = bool(set(levels) - {"weights"})
    if running:
        subject.renew()
    ids = check_ids(subject) if running else frozenset()
    refused = refusals(subject) if running else None
    options: dict[str, dict[str, Any]] = {"structure": {"strict": strict, "spoil": spoil}, "native": {"modes": modes}}
    results: list[LevelResult] = []
    for level in levels:
        if level == "wiring" and subject.dropping is not None:
            results.append(LevelResult(level, "not run", "the models drop: compare them in eval mode for this level"))
        elif level in subject.unavailable:
            results.append(LevelResult(level, "not run", subject.unavailable[level]))
        elif refused and level != "weights":
            results.append(refused if level == "structure" else LevelResult(level, "not run", refused.findings[0].what))
        else:
            results.append(attempt(level, subject, options.get(level, {})))
    results = results if refused else made_good(subject, results)
    failed = not refused and any(result.status == "failed" for result in results)
    stopped = not refused and any(result.status == "not run" for result in results)
    if (failed or stopped) and running:
        subject.check_repeatable()
    lost: list[Note] = []
    path = attempted("trace", lambda: trace_subject(subject), lost) if failed and trace else None
    # The levels have already said what fails; trace and diagnosis only help to find it.
    found = attempted("diagnosis", lambda: diagnose_subject(subject, seconds), lost) if failed and diagnose else None
    only_back = failed and "gradients" in [result.level for result in results if result.status == "failed"]
    forward_agrees = found is None or found.passed
    only_back = only_back and diagnose and forward_agrees
    backward = attempted("diagnosis of gradients", lambda: isolate_backward(subject), lost) if only_back else None
    notes = (*lost, *lint(subject, ids), *(() if refused or not running else remarks(subject, results)))
    return Report(
        tuple(results),
        path,
        environment(subject),
        subject.seed,
        notes,
        found,
        backward=backward,
        transfer=as_planned(subject.pairing),
    )


def remarks(subject: Subject, results: list[LevelResult]) -> tuple[Note, ...]:
    """What the models do besides returning something, and what of them was compared or cannot be."""
    climbed = {result.level for result in results if result.status in ("passed", "failed")}
    found: list[Note] = []
    for side, run in (("torch", subject.torch_native), ("Flax", subject.flax_native)):
        found += [
            Note("input-written", path, f"is written into by the {side} model; every run here was given an untouched copy")
            for path in run.written
        ]
        if run.attributes:
            names = ", ".join(run.attributes)
            text = f"the {side} model changes plain attributes as it runs: {names}; they are put back after every run here"
            found.append(Note("attribute-changed", "", text, {"attributes": list(run.attributes)}))
    wide = "identical" in climbed
    found += subject.padding.notes(subject.torch_whole if wide else subject.torch_native, subject.flax_whole if wide else None)
    found += flushed(subject) if "native" in climbed else []
    if "gradients" in climbed and subject.torch_wide.gradients and numbers(subject.torch_wide):
        found += unseen_parameters(subject) + unreached(subject)
    return tuple(found)


def attempt(level: str, subject: Subject, options: Mapping[str, Any]) -> LevelResult:
    """One level. What the user's model raises on the way is a level that could not run, not a crash."""
    try:
        return CLIMB[level](subject, **options)
    except InputError:
        raise
    except NotRecordedError as error:
        return LevelResult(level, "not run", str(error))
    except Exception as error:
        return LevelResult(level, "not run", raised(error))


def attempted(what: str, make: Callable[[], Made], lost: list[Note]) -> Made | None:
    """What is made; None if the models do not let it be, and a note in `lost` of why."""
    try:
        return make()
    except NotRecordedError:
        # What a recording does not hold is told where it is replayed.
        return None
    except Exception as error:
        lost.append(Note("not-looked-into", "", f"the {what} could not be made: {raised(error)}"))
        return None


def refusals(subject: Subject) -> LevelResult | None:
    """The level `structure`, failed, if one side refuses the inputs.

    Raises:
        InputError: both do, or neither returns anything.
    """
    errors: dict[str, Exception] = {}
    try:
        subject.torch_native  # noqa: B018
    except InputError:
        raise
    except Exception as error:
        errors["torch"] = error
    try:
        # What Flax is asked for depends on torch's outputs, so without them it is asked for less.
        subject.flax.evaluate(subject.flax_model, subject.call) if errors else subject.flax_native
    except InputError:
        raise
    except Exception as error:
        errors["flax"] = error
    if len(errors) == 2:
        told = f"torch: {raised(errors['torch'])}. Flax: {raised(errors['flax'])}"
        raise InputError(f"both models refuse these inputs. {told}", "both sides raise")
    if not errors:
        refuse_nothing(subject)
        return None
    [(name, error)] = errors.items()
    expected, actual = (f"raises {raised(error)}", "returns") if name == "torch" else ("returns", f"raises {raised(error)}")
    figures = {"raises": name, "error": type(error).__name__, "message": str(error), "line": users_line(error)}
    finding = Finding("", f"expected (torch) {expected}; actual (flax) {actual}", figures)
    return LevelResult("structure", "failed", "one side refuses the inputs", {"raises": name}, (finding,))


def refuse_nothing(subject: Subject) -> None:
    """Refuse models of which neither returns anything: they would agree whatever they compute.

    Raises:
        InputError: neither does.
    """
    if all(leaf is None for run in (subject.torch_native, subject.flax_native) for leaf in run.outputs.values()):
        raise InputError("both models return nothing, so that nothing can be compared; return what counts", "nothing returned")


def checked_modes(modes: Iterable[str]) -> tuple[str, ...]:
    ways = names(modes)
    if not ways or any(way not in ("compiled", "eager") for way in ways):
        raise InputError(f"modes must be 'compiled', 'eager' or both, got {', '.join(map(repr, ways)) or 'nothing'}")
    return ways


def replays(dropout: Any) -> bool:
    """Whether the models may drop.

    Raises:
        InputError: it is neither of what can be asked for.
    """
    if dropout not in (None, "replay"):
        raise InputError(f"dropout must be None or 'replay', got {dropout!r}")
    return dropout is not None


def names(given: Any) -> tuple[Any, ...]:
    """One name or several; what is neither becomes the only, unknown, name."""
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def checked_levels(levels: Iterable[str] | None, steps: bool = False) -> tuple[str, ...]:
    """The levels below training, in order; that one is climbed where there are steps.

    Raises:
        InputError: there is no such level, or nothing is left of them.
    """
    chosen = LEVELS if levels is None else names(levels)
    unknown = [level for level in chosen if level not in (*LEVELS, TRAINING)]
    if unknown or not chosen:
        known = ", ".join((*LEVELS, TRAINING))
        raise InputError(
            f"no such level: {', '.join(map(repr, unknown)) or 'none given'}; the levels are {known}", "no-such-level"
        )
    if TRAINING in chosen and not steps:
        raise InputError("the level training needs steps=N, optimizer=... and loss=...")
    return tuple(level for level in LEVELS if level in chosen)


def environment(subject: Subject) -> Environment:
    """What the pair was compared with: the process as it is, and what was pinned."""
    with subject.torch.pinned() as torch_settings, subject.flax.pinned() as jax_settings:
        pinned = {**torch_settings, **jax_settings}
    return surroundings(subject.torch, subject.flax, pinned=pinned)
