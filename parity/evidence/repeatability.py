"""Models that return other numbers when they are run again: where it begins, and what to do."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from parity.errors import InputError, NotRecordedError, raised
from parity.evidence.calls import Call, Captured, Evaluation
from parity.evidence.numerics import same_bits

if TYPE_CHECKING:
    from parity.evidence.subject import Subject

Result = TypeVar("Result")

# How often a model is run again where something failed: what it draws may count in some runs only.
AGAIN = 3

ADVICE = {
    "torch": "turn off what is random in it (dropout that ignores .eval(), sampling), then compare again",
    "flax": "turn off what is random in it (.eval(), or deterministic=True where dropout is called), then compare again",
}


def unequal(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """The first output that two runs do not share, None if they share all."""
    for path, mine in one.items():
        theirs = other.get(path)
        if isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray):
            same = mine.shape == theirs.shape and mine.dtype == theirs.dtype and bool(same_bits(mine, theirs).all())
        else:
            # Of other objects, such as a cache, two runs return two, and nothing says whether they are equal.
            plain = isinstance(mine, bool | int | float | str)
            same = type(mine) is type(theirs) and (not plain or mine == theirs or (mine != mine and theirs != theirs))
        if not same:
            return path
    return next((path for path in other if path not in one), None)


def run_again(side: str, run: Callable[[], Result]) -> Result:
    """Another run of a model that has returned on equal input.

    Raises:
        InputError: it raises this time.
    """
    try:
        return run()
    except NotRecordedError:
        raise
    except Exception as error:
        raise raises_at_times(side, error) from None


def raises_at_times(side: str, error: Exception) -> InputError:
    """What a model is refused with that returns in one run and raises in another."""
    told = f"the {side} model raises in one run and returns in another on equal input: {raised(error)}; "
    return InputError(told + "let nothing that it keeps from call to call change what it does", "not repeatable")


def refuse_torch(room: Any, model: Any, call: Call, first: Evaluation, second: Evaluation) -> None:
    """Refuse a torch model of which two runs on equal input differ.

    Raises:
        InputError: they do. It names the first module that does.
    """
    path = unequal(first.outputs, second.outputs)
    if path is None:
        return
    with room.pinned():
        runs = [room.capture(model, call)[1] for _ in range(2)]
    kinds = {layer.path: layer.kinds[0] for layer in room.layers(model)}
    raise InputError(
        f"the torch model returns different numbers for the same input at output {path or 'of the model'}; "
        f"{beginning(runs, kinds)}{ADVICE['torch']}",
        "not repeatable",
    )


def refuse_flax(room: Any, model: Any, call: Call, *, reseed: bool) -> None:
    """Refuse a Flax model of which two runs differ.

    Args:
        room: that of the model.
        model: an `nnx.Module` or a `parity.Linen`.
        call: the arguments.
        reseed: give the second run other random keys; else both are the same, traced anew.

    Raises:
        InputError: they do. It names the first module that does.
    """
    seeds = (1, 2) if reseed else (0, 0)
    # As a rule no key gets that far, which shows without a run; else two, run once and compiled, are cheap still. Only a
    # module's name costs a run that records all of them.
    if reseed and not room.reached_by_keys(model, call):
        return
    if reseed and unequal(*(room.evaluate(model, call, quick=True, reseed=seed).outputs for seed in seeds)) is None:
        return
    if not reseed and same_traces(room, model, call):
        return
    try:
        (first, modules), (second, others) = (room.capture(model, call, reseed=seed) for seed in seeds)
    except Exception:
        # What runs may not let itself be recorded; then no module is named.
        if not reseed:
            return
        modules, others = [], []
    if not reseed and unequal(first.outputs, second.outputs) is None:
        return
    kinds = {layer.path: layer.kinds[0] for layer in room.layers(model) if layer.kinds}
    why = "returns other numbers with other random keys" if reseed else "returns different numbers for the same input"
    raise InputError(f"the Flax model {why}; {beginning([modules, others], kinds)}{ADVICE['flax']}", "not repeatable")


def refuse_unrepeatable(subject: "Subject") -> None:
    """Refuse models that draw outside of their framework's generators, or go by what they keep from call to call.

    Looked for only where something failed: a model of which all runs so far agree draws nothing that counts. Torch runs in
    float64, which shows what float32 rounds away; Flax is traced anew.

    Raises:
        InputError: one does, or raises where it returned before.
    """
    torch, flax, call = subject.torch, subject.flax, subject.call

    def wide() -> Evaluation:
        found: Evaluation = torch.evaluate(subject.torch_model, call, dtype="float64")
        return found

    def twice() -> None:
        # Each time it is pinned, torch's generator stands where it stood before.
        with torch.pinned():
            first, *others = wide(), *(run_again("torch", wide) for _ in range(AGAIN))
        for other in others:
            refuse_torch(torch, subject.torch_model, call, first, other)

    def anew() -> None:
        subject.refuse_drawing()
        if "flax_native" in vars(subject):
            run_again("Flax", lambda: flax.traced(subject.flax_model, call))
        refuse_flax(flax, subject.flax_model, call, reseed=False)

    # The masks of a run that drops are those of that run.
    checks = {"torch": twice if subject.dropping is None else lambda: None, "flax": anew}
    for check in (check for side, check in checks.items() if side not in subject.recorded):
        try:
            check()
        except InputError:
            raise
        except Exception:
            # What cannot run for another reason is told where it is asked to.
            continue


def same_traces(room: Any, model: Any, call: Call) -> bool:
    """Whether jax traces a model alike each time; a model that decides by values cannot be traced, and has to be run."""
    try:
        first = room.traced(model, call)
        return all(room.traced(model, call) == first for _ in range(AGAIN))
    except Exception:
        return False


def beginning(runs: list[list[Captured]], kinds: dict[str, str]) -> str:
    """The first module whose output differs between two runs, in words."""
    for one, other in zip(*runs, strict=False):
        if (one.path, one.call) != (other.path, other.call) or unequal(one.outputs, other.outputs) is not None:
            kind = f" ({kinds[one.path]})" if kinds.get(one.path) else ""
            return f"the first module that differs between two runs is {one.path or 'the model itself'}{kind}; "
    return ""
