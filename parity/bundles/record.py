"""One model on the record: all that a comparison asks of it, in a file, where the other framework need not be installed."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from parity.bundles.answers import Recording
from parity.bundles.dropping import as_facts
from parity.bundles.encoding import Encoder, setting
from parity.bundles.file import place_problems, write
from parity.bundles.form import KEEPS
from parity.dropout.masks import DropoutMasks
from parity.errors import InputError, ParityError, listed, raised
from parity.evidence.calls import Evaluation, ModuleCall
from parity.evidence.compare import replays
from parity.evidence.dropping import drawn_once
from parity.evidence.ids import check_ids
from parity.evidence.input_sets import InputSet, given_sets
from parity.evidence.ladder import spoiled, torch_outcome
from parity.evidence.padding import Padding
from parity.evidence.repeatability import refuse_flax
from parity.evidence.sampling import sampled
from parity.evidence.subject import Subject, argument_problems, as_call, plain_masks
from parity.evidence.trees import mapped
from parity.evidence.unseen import unseen_parameters
from parity.evidence.wiring import find_probe
from parity.frameworks import describe, owner
from parity.weights.leaf import Layer, Leaf, digest

# Runs of torch by which its noise is measured.
STAGES = ("plain", "ensemble", "shaken", "elementary", "elementary_more")


def record(
    model: Any,
    *args: Any,
    path: str | os.PathLike[str],
    kwargs: Mapping[str, Any] | None = None,
    keep: str = "all",
    seed: int = 0,
    gradients: bool = True,
    padding_mask: Any = None,
    dropout: str | None = None,
) -> Path:
    """Write down what a model of either framework does, for `parity.replay` and `parity.bundle_diff`.

    The file holds the parameters, the arguments, the outputs in the model's dtype and in float64, what every module
    took and returned in each call, gradients for a fixed random cotangent, torch's own noise, what the model does with
    inputs that do not fit, the settings of its layers, versions and devices. It is a safetensors file whose metadata is
    JSON; nothing in it can be run. An array that is met twice is kept once.

    Recording a torch model runs it 43 times: its noise is measured by running it again on numbers that roundings have
    moved, 16 times operation by operation. An encoder of three layers, 1.6 MB of parameters, took 7.4 s of one core,
    600 times its forward and backward pass, and 0.7 s without gradients, 50 times. Its file had 15 MB with `keep='all'`,
    0.9 MB as summaries, 0.5 MB as digests; without gradients 6.9, 0.5 and 0.3 MB. Recording a Flax model runs it seven
    times and compiles most of them.

    Args:
        model: a `torch.nn.Module`, an `nnx.Module` or a `parity.Linen`, in eval mode.
        args: positional arguments: tensors, arrays or NumPy; or one `InputSet`, or one list of them. Every set is recorded.
        path: of the file, which ends in .safetensors; an existing one is replaced once the new one is whole.
        kwargs: keyword arguments.
        keep: `all`; `summaries` keeps the digests of parameters, and of gradients and of what modules take and return 512
            values of each array: the trace still tells, but modules are not run alone and gradients are not judged by a
            replay; `digests` keeps nothing of modules and gradients. Arguments and outputs are whole in each.
        seed: of cotangents, probes and jitter; a replay uses the same.
        gradients: whether gradients are recorded.
        padding_mask: as in `parity.compare`.
        dropout: None refuses models that drop; `replay` takes a torch model in train mode, and records the masks that it
            draws for `seed`: a Flax model drops by them in a replay. As in `parity.compare`, the level `wiring`, inputs
            that do not fit and the diagnosis are left out then.

    Returns:
        The path.

    Raises:
        InputError: the model or an argument cannot be recorded as it stands, the model raises (its error is the cause),
            drops or returns other numbers when it is run again, ids are out of range, or the file cannot be written. What
            stood at `path` stands there still.
        MissingFrameworkError: the framework of the model is not installed.
    """
    place = Path(path)
    drops = replays(dropout)
    room, sets = checked(model, args, kwargs, keep, seed, place, drops)
    recording, sides = Recording(room), list[OneSide]()
    for one in sets:
        side = OneSide(recording, model, one, seed, gradients, padding_mask, drops)
        with drawn_once(side.unheard()) if drops else contextlib.nullcontext() as side.masks:
            (torch_side if room.NAME == "torch" else flax_side)(side, keep)
        sides.append(side)
    encoder = Encoder()
    write(place, facts_of(sides, sets, recording, encoder, keep), encoder.arrays)
    return place


def checked(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, keep: str, seed: int, place: Path, drops: bool
) -> tuple[ModuleType, list[InputSet]]:
    """The room of a model, and its input sets.

    Raises:
        InputError: something cannot be used; all reasons at once.
    """
    problems = [*argument_problems(kwargs or {}, seed), *place_problems(place)]
    room = owner(model)
    if room is None or not room.is_model(model):
        problems.append(f"model must be a torch.nn.Module, a flax.nnx.Module or a parity.Linen, got {describe(model)}")
    elif drops and room.NAME != "torch":
        problems.append(
            "dropout='replay' records the masks of a torch model, which are replayed in Flax; record the torch model, or "
            "call model.eval() and leave dropout out"
        )
    if keep not in KEEPS:
        problems.append(f"keep must be {', '.join(map(repr, KEEPS))}, got {keep!r}")
    if problems:
        raise InputError(listed("cannot record", problems))
    assert room is not None
    return room, given_sets(args, kwargs)


class OneSide(Subject):
    """One model and one call of it, in the place of a pair.

    Args:
        recording: the room of the model, which keeps what it answers.
        model: left as it is.
        one: the arguments.
        seed: of cotangents, probes and jitter.
        gradients: whether runs compute gradients.
        padding_mask: as in `parity.compare`.
        drops: whether the model may drop.

    Attributes:
        masks: by which it drops; None if it does not.

    Raises:
        InputError: the model cannot be recorded as it stands; all reasons at once.
    """

    recorded = frozenset(("torch", "flax"))
    masks: DropoutMasks | None = None

    def __init__(
        self, recording: Recording, model: Any, one: InputSet, seed: int, gradients: bool, padding_mask: Any, drops: bool
    ):
        self.torch: Any = recording
        # Whether jax has 64-bit types counts only where the model is jax's.
        self.flax: Any = recording if recording.room.NAME == "flax" else SimpleNamespace(x64_enabled=lambda: True)
        self.seed, self.gradients, self.native_gradients, self.pins_checked = seed, gradients, gradients, False
        self.not_differentiable, self.unavailable, self.dropping = {}, {}, None
        self.call = as_call(model, one.args, one.kwargs)
        self.padding_mask = plain_masks(padding_mask)
        self.padding = Padding(self.padding_mask)
        self.torch_model = self.flax_model = model if recording.room.NAME == "torch" else recording.with_call(model, self.call)
        problems = [sentence.partition(", or compare it")[0] for sentence in recording.problems_before_running(model, drops)]
        problems += [sentence.replace("the torch model", "the model") for sentence in self.dtype_problems()]
        if problems:
            raise InputError(listed("cannot record", problems))
        # The probes of the level wiring ask which arrays have a counterpart: all of them, as far as one side knows.
        pairs = [SimpleNamespace(source=leaf) for leaf in recording.leaves(model) if leaf.role in ("parameter", "buffer")]
        self.pairing: Any = SimpleNamespace(pairs=pairs, problems=())

    @property
    def recording(self) -> Recording:
        """The room."""
        found: Recording = self.torch
        return found

    def unheard(self) -> "OneSide":
        """The same, whose runs are not kept."""
        other = self.__class__.__new__(self.__class__)
        vars(other).update(vars(self))
        other.torch = self.recording.room
        return other


def torch_side(side: OneSide, keep: str) -> None:
    """Ask a torch model all that a comparison may ask it."""
    ran(lambda: side.torch_native)
    check_ids(side)
    quietly(lambda: keep_forwards(side))
    quietly(lambda: side.pinned_dtype("torch"))
    if side.masks is None:
        if not isinstance(side.torch.raises(side.torch_model, side.call), str):
            for _, call, soft in spoiled(side):
                torch_outcome(side, call, soft)
        quietly(lambda: find_probe(side, {}))
    quietly(lambda: keep_noise(side))
    if side.gradients:
        quietly(lambda: side.watched_kinks)
        quietly(lambda: unseen_parameters(side))
        quietly(lambda: keep_off_ties(side))
    if keep != "digests":
        for dtype in (None, "float64"):
            with side.torch.pinned():
                quietly(lambda dtype=dtype: side.torch.observe(side.torch_model, side.call, dtype=dtype))
    if side.gradients and keep == "all":
        with side.torch.pinned():
            quietly(lambda: side.torch.observe_backward(side.torch_model, side.call, side.cotangents or {}, dtype="float64"))


def ran(run: Callable[[], Any]) -> Any:
    """What a run gives.

    Raises:
        InputError: the model raises.
    """
    try:
        return run()
    except ParityError:
        raise
    except Exception as error:
        raise InputError(
            f"cannot record: the model raises {raised(error)}; mend it, or give arguments that it takes"
        ) from error


def keep_forwards(side: OneSide) -> None:
    """The float64 run, and its outputs once more for who asks for no gradients."""
    forwards = replace(side.torch_whole, gradients={})
    key = side.recording.questions.asked("evaluate", side.call, (), {"dtype": "float64"})
    side.recording.answers.setdefault(key, {"returns": forwards})


def quietly(ask: Callable[[], Any]) -> None:
    """Ask what a model may refuse: that it does so is kept as well."""
    with contextlib.suppress(Exception):
        ask()


def keep_off_ties(side: OneSide) -> None:
    """Gradients on inputs that are moved off ties and kinks, if there are any."""
    if side.ties or side.on_kinks:
        other: Any = side.off_ties
        quietly(lambda: (other.torch_native, other.torch_wide))
        keep_noise(other)


def keep_noise(side: OneSide) -> None:
    """How far torch's own runs are apart, for every output and gradient."""
    other, stages = side.unheard(), side.recording.keep
    for kind in ("outputs", "gradients"):
        for path, array in getattr(side.torch_wide, kind).items():
            if not isinstance(array, np.ndarray):
                continue
            if kind == "outputs" and array.dtype.kind in "biu":
                for of in ("wide", "native"):
                    stages("unsettled", side.call, (of, path), other.unsettled(of, path))
            elif "float" in str(array.dtype):
                stages("wide_noise", side.call, (kind, path), other.wide_noise(kind, path))
                for stage in STAGES:
                    stages("noise", side.call, (stage, kind, path), other.noise(stage, kind, path))


def flax_side(side: OneSide, keep: str) -> None:
    """Ask a Flax model all that a comparison may ask it."""
    room, model, call = side.recording, side.flax_model, side.call
    plain = ran(lambda: room.evaluate(model, call))
    if room.draws(model):
        refuse_flax(room.room, model, call, reseed=True)
    refuse_flax(room.room, model, call, reseed=False)
    side.padding.check(plain)
    cotangents = side.cotangents_for(side.padding.seen(plain)) if side.gradients else None
    quietly(lambda: room.evaluate(model, call, dtype="float64", quick=True))
    quietly(lambda: room.evaluate(model, call, compiled=False))
    quietly(lambda: room.output_dtypes(model, call, "float64"))
    for _, other, _ in spoiled(side):
        room.raises(model, other)
    if cotangents is not None:
        quietly(lambda: room.evaluate(model, call, cotangents=cotangents))
        quietly(lambda: room.evaluate(model, call, dtype="float64", cotangents=cotangents, quick=True))
        if keep == "all":
            moved: Any = side.off_ties
            quietly(lambda: room.evaluate(model, moved.call, cotangents=cotangents))
            quietly(lambda: room.evaluate(model, moved.call, dtype="float64", cotangents=cotangents, quick=True))
    if keep != "digests":
        quietly(lambda: room.observe(model, call, dtype="float64"))


# ------------------------------------------------------------------------------ the facts


def facts_of(
    sides: Sequence[OneSide], sets: Sequence[InputSet], recording: Recording, encoder: Encoder, keep: str
) -> dict[str, Any]:
    """All that is known of a model, as JSON."""
    first = sides[0]
    model = first.torch_model
    with recording.pinned() as pinned:
        environment = recording.environment()
    kinds = recording.kinds(model)
    return {
        "side": recording.NAME,
        "room": recording.room.__name__.rpartition(".")[2],
        "model": kinds[0] if kinds else type(model).__name__,
        "keep": keep,
        "made": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seed": first.seed,
        "gradients": any(side.gradients for side in sides),
        "dtype": first.dtype,
        "x64": bool(first.flax.x64_enabled()),
        "environment": environment,
        "machine": {"python": platform.python_version(), "system": platform.platform(), **packages()},
        "pinned": dict(pinned),
        "leaves": leaves(recording.leaves(model), encoder, keep),
        "layers": [layer(one, encoder) for one in recording.layers(model)],
        "sets": [set_facts(side, one, encoder) for side, one in zip(sides, sets, strict=True)],
        "answers": {key: answer(told, encoder, keep) for key, told in recording.answers.items()},
    }


def packages() -> dict[str, str]:
    """The versions of what is installed besides the framework."""
    return {name: importlib.metadata.version(name) for name in ("torch-flax-parity", "numpy")}


def set_facts(side: OneSide, one: InputSet, encoder: Encoder) -> dict[str, Any]:
    """One input set."""
    return {
        "name": one.name,
        "shows": one.shows,
        "call": encoder.encoded(side.call),
        "padding mask": encoder.encoded(side.padding_mask),
        "masks": encoder.encoded(as_facts(side.masks)),
    }


def leaves(found: Iterable[Leaf], encoder: Encoder, keep: str) -> list[dict[str, Any]]:
    """Every array of a model, with its values or its digest."""
    numbers: dict[Any, int] = {}
    told = []
    for leaf in found:
        # What a run leaves behind, and random state, never travels: its values are nobody's business.
        readable = not leaf.unreadable and leaf.role in ("parameter", "buffer")
        array = leaf.read() if readable else None
        told.append(
            {
                "path": leaf.path,
                "owner": leaf.owner,
                "name": leaf.name,
                "kinds": list(leaf.kinds),
                "shape": list(leaf.shape),
                "dtype": leaf.dtype,
                "role": leaf.role,
                "identity": numbers.setdefault(leaf.identity, len(numbers)),
                "unreadable": leaf.unreadable,
                "claims": [[claim.owner, claim.name, list(claim.kinds)] for claim in leaf.claims],
                "also": list(leaf.also),
                "by_name": leaf.by_name,
                "merged": list(leaf.merged),
                "loose": leaf.loose,
                "digest": digest(array) if array is not None else "",
                "values": encoder.array(array) if array is not None and keep == "all" else None,
            }
        )
    return told


def layer(one: Layer, encoder: Encoder) -> dict[str, Any]:
    """A layer and those of its settings that are numbers, words or functions."""
    settings = []
    for name in one.named():
        try:
            value = one.settings(name)
        except Exception:
            continue
        # What is not there reads as None.
        if (told := setting(value, encoder)) is not None:
            settings.append([name, told])
    return {
        "path": one.path,
        "kinds": list(one.kinds),
        "own_path": one.own_path,
        "also": list(one.also),
        "by_name": one.by_name,
        "settings": settings,
    }


def answer(told: Mapping[str, Any], encoder: Encoder, keep: str) -> dict[str, Any]:
    """An answer as JSON, with as much of its arrays as is to be kept."""
    if "raises" in told:
        return {**told, **({"watcher": encoder.encoded(told["watcher"])} if "watcher" in told else {})}
    short = told["returns"] if keep == "all" else shortened(told["returns"], keep)
    return {name: encoder.encoded(short if name == "returns" else told[name]) for name in told}


def shortened(value: Any, keep: str) -> Any:
    """An answer with some values of its gradients, if any, and of what modules took and returned; outputs stay whole."""
    if isinstance(value, Evaluation):
        return replace(value, gradients=short(value.gradients) if keep == "summaries" else {})
    if isinstance(value, list) and value and all(isinstance(one, ModuleCall) for one in value):
        return [replace(one, args=short(one.args), kwargs=short(dict(one.kwargs)), output=short(one.output)) for one in value]
    return value


def short(tree: Any) -> Any:
    return mapped(lambda _, leaf: sampled(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)
