"""Climb the ladder for a pair of models."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from parity.errors import InputError, first_line
from parity.evidence.backward import isolate_backward
from parity.evidence.diagnose import diagnose_subject
from parity.evidence.dropping import replayed
from parity.evidence.ladder import CLIMB
from parity.evidence.result import LEVELS, TRAINING, Finding, LevelResult, Report
from parity.evidence.subject import Subject, arrays_of
from parity.evidence.trace import trace_subject
from parity.training.level import Plan, planned, training
from parity.training.recipe import Recipe

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
    dropout: str | None = None,
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
        args: positional arguments for both: tensors, arrays or NumPy, in the dtype of the models.
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
        dropout: None refuses models that drop; `replay` takes them in train mode, and lets both drop by the masks
            that torch draws for `seed`. How they drop is part of the level `structure` then; the level `wiring`,
            inputs that do not fit and the diagnosis are left out. Batch norms must be in eval mode.
        steps: to train copies of both, put into train mode, after the other levels: in float64 from the same
            state, and in their own dtype each step from torch's state, with torch's dropout masks.
        optimizer: with `steps`; as in `parity.train_both`, and so `loss`.
        loss: with `steps`.
        batches: of the training; they are taken in turn, anew from the first if there are fewer than it takes. None
            trains on the arguments: the last is the target, if the loss has one.
        recipe: what else happens in a step of training.

    Returns:
        The report; on failure with a trace that names the first divergence, and with a diagnosis.

    Raises:
        InputError: a model or an argument cannot be compared as it stands, or both models refuse it.
        MissingFrameworkError: a framework is not installed.
    """
    drops, ways = replays(dropout), checked_modes(modes)
    below = [name for name in LEVELS if name != "wiring"] if drops and levels is None else levels
    chosen, plan = checked_levels(below, bool(steps)), None
    if steps or (optimizer, loss, batches, recipe) != (None,) * 4:
        # That the two are models at all is said below, for every level.
        options: dict[str, Any] = {"optimizer": optimizer, "loss": loss, "batches": batches, "recipe": recipe}
        plan = planned(torch_model, flax_model, args, kwargs or {}, steps=steps, rename=rename, ignore=ignore, **options)
    subject = Subject(
        torch_model,
        flax_model,
        args,
        kwargs or {},
        rename=rename,
        ignore=(ignore,) if isinstance(ignore, str) else tuple(ignore),
        seed=seed,
        gradients="gradients" in chosen,
        dropout=drops,
    )
    if not drops:
        return climb(subject, chosen, ways, strict, diagnose=diagnose, plan=plan)
    with replayed(subject):
        report = climb(subject, chosen, ways, strict, spoil=False, diagnose=False)
    if plan is None:
        return report
    # Each step of the training has masks of its own.
    result, trained = training(plan)
    return replace(report, levels=(*report.levels, result), training=trained)


def climb(
    subject: Subject,
    levels: tuple[str, ...],
    modes: tuple[str, ...],
    strict: bool = False,
    spoil: bool = True,
    diagnose: bool = True,
    plan: Plan | None = None,
) -> Report:
    """`compare` for models that are already checked.

    Args:
        subject: the pair and its call.
        levels: in the ladder's order.
        modes: as in `compare`.
        strict: as in `compare`.
        spoil: whether inputs that do not fit are tried too.
        diagnose: as in `compare`.
        plan: of the training, if there is to be one.
    """
    refused = refusals(subject) if set(levels) - {"weights"} else None
    options: dict[str, dict[str, Any]] = {"structure": {"strict": strict, "spoil": spoil}, "native": {"modes": modes}}
    results: list[LevelResult] = []
    for level in levels:
        if level == "wiring" and subject.dropping is not None:
            results.append(LevelResult(level, "not run", "the models drop: compare them in eval mode for this level"))
        elif refused and level != "weights":
            results.append(refused if level == "structure" else LevelResult(level, "not run", refused.findings[0].what))
        else:
            results.append(attempt(level, subject, options.get(level, {})))
    trained = None
    if plan is not None:
        result, trained = training(plan) if not refused else (LevelResult(TRAINING, "not run", refused.findings[0].what), None)
        results.append(result)
    # What parts in training alone is told there: the outputs of modules agree.
    failed = not refused and any(result.status == "failed" for result in results if result.level != TRAINING)
    trace = attempted(lambda: trace_subject(subject)) if failed else None
    # The levels have already said what fails; trace and diagnosis only help to find it.
    found = attempted(lambda: diagnose_subject(subject)) if failed and diagnose else None
    only_back = failed and "gradients" in [result.level for result in results if result.status == "failed"]
    forward_agrees = found is None or found.passed
    backward = attempted(lambda: isolate_backward(subject)) if only_back and diagnose and forward_agrees else None
    return Report(tuple(results), trace, environment(subject), subject.seed, lint(subject), found, backward, trained)


def attempt(level: str, subject: Subject, options: Mapping[str, Any]) -> LevelResult:
    """One level. What the user's model raises on the way is a level that could not run, not a crash."""
    try:
        return CLIMB[level](subject, **options)
    except InputError:
        raise
    except Exception as error:
        return LevelResult(level, "not run", f"{type(error).__name__}: {first_line(error)}")


def attempted(make: Callable[[], Made]) -> Made | None:
    """What is made, None if the models do not let it be."""
    try:
        return make()
    except Exception:
        return None


def refusals(subject: Subject) -> LevelResult | None:
    """The level `structure`, failed, if one side refuses the inputs.

    Raises:
        InputError: both do.
    """
    errors = {}
    try:
        subject.torch_native  # noqa: B018
    except InputError:
        raise
    except Exception as error:
        errors["torch"] = f"{type(error).__name__}: {first_line(error)}"
    try:
        # What Flax is asked for depends on torch's outputs, so without them it is asked for less.
        subject.flax.evaluate(subject.flax_model, subject.call) if errors else subject.flax_native
    except InputError:
        raise
    except Exception as error:
        errors["flax"] = f"{type(error).__name__}: {first_line(error)}"
    if len(errors) == 2:
        raise InputError(f"both models refuse these inputs. torch: {errors['torch']}. Flax: {errors['flax']}")
    if not errors:
        return None
    name = next(iter(errors))
    expected, actual = ("raises " + errors["torch"], "returns") if name == "torch" else ("returns", "raises " + errors["flax"])
    finding = Finding("", f"expected (torch) {expected}; actual (flax) {actual}")
    return LevelResult("structure", "failed", "one side refuses the inputs", findings=(finding,))


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
        raise InputError(f"no such level: {', '.join(map(repr, unknown)) or 'none given'}; the levels are {known}")
    if TRAINING in chosen and not steps:
        raise InputError("the level training needs steps=N, optimizer=... and loss=...")
    return tuple(level for level in LEVELS if level in chosen)


def environment(subject: Subject) -> dict[str, str]:
    with subject.torch.pinned() as torch_settings, subject.flax.pinned() as jax_settings:
        return {**subject.torch.environment(), **subject.flax.environment(), **torch_settings, **jax_settings}


def lint(subject: Subject) -> tuple[str, ...]:
    """What inputs of this kind cannot show."""
    notes = []
    for path, array in subject.values():
        if not array.size:
            notes.append(f"{path} is empty: nothing is computed from it, and nothing shown")
        elif (array == array.flat[0]).all():
            notes.append(f"{path} is constant ({array.flat[0]!s}): a wrong scale, order or axis may not show")
        elif array.ndim > 1 and array.shape[0] == 1:
            notes.append(f"{path} has a batch of one: mixed-up batch entries do not show")
    for path, array in arrays_of(subject.call):
        masklike = path not in subject.call.castable and "float" in str(array.dtype) and array.size
        if masklike and np_is_switch(array):
            notes.append(f"{path} is a floating point mask of 0 and 1: some layers add such a mask, others switch by it")
    return tuple(notes)


def np_is_switch(array: Any) -> bool:
    return bool(((array == 0) | (array == 1)).all())
