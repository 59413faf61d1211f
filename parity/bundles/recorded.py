"""A side that is read from a bundle, in the place of a framework's room and of its model."""

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from parity.bundles.answers import Questions
from parity.bundles.file import Bundle
from parity.bundles.form import checked
from parity.errors import NotRecordedError
from parity.evidence.calls import Call, Captured, Evaluation, ModuleCall
from parity.evidence.numerics import Noise
from parity.evidence.trees import flatten
from parity.weights.files import Tree
from parity.weights.leaf import Claim, Layer, Leaf

# Names under which functions of a room are asked for in an error.
TOLD = {
    "evaluate": "a run of the model like this one",
    "observe": "what its modules take and return",
    "observe_backward": "what comes back to its modules",
    "raises": "what it does with other inputs",
    "lookups": "which tables it looks its ids up in",
    "output_dtypes": "the dtypes of its outputs in another run",
}


# What answers are.
RETURNED: dict[str, Any] = {
    "evaluate": Evaluation,
    "observe": list[ModuleCall],
    "raises": str | tuple[tuple[int, ...], ...],
    "output_dtypes": dict[Any, str],
    "noise": Noise,
    "wide_noise": list[float],
    "unsettled": np.ndarray,
}
# What watchers know.
WATCHED: dict[str, Any] = {
    **{"scores": set[str], "unsaturated": set[str], "near": int, "exact": int, "ties": int},
    "bounds": dict[tuple[str, float], bool],
}
# What settings are that comparisons work with; others are only told, or compared.
SETTINGS: dict[str, Any] = {"parameter dtype": str, "buffers that are not saved": list[str]}


# What else rooms do: all of it runs the model.
RUNS = ("alone", "operations", "gradients_by_use", "pulled_back", "Shaken", "Elementary", "Edited", "Recorder")


class Watcher:
    """Stands for what watched a run: it knows what that knew.

    Args:
        given: what it was made with; a recording needs none of it.
    """

    def __init__(self, *given: Any):
        self.given = given


class Prover(Watcher):
    """As of the torch room."""


class Kinks(Watcher):
    """As of the torch room."""


class NotProvableError(Exception):
    """As of the torch room."""

    structural = False


class Recorded(Tree):
    """What a bundle tells of its model: room and model in one.

    Args:
        bundle: that was opened.
    """

    Prover, Kinks, NotProvableError = Prover, Kinks, NotProvableError

    def __init__(self, bundle: Bundle):
        self.bundle, self.questions = bundle, Questions()
        self.NAME = bundle.side  # type: ignore[assignment]
        self.__name__ = f"parity.frameworks.{bundle.facts['room']}"

    # --- what it is ---------------------------------------------------------------------------

    @cached_property
    def every_leaf(self) -> list[Leaf]:
        return [self.leaf(told) for told in self.bundle.facts["leaves"]]

    def leaves(self, value: Any) -> list[Leaf]:
        """Every array, with its values where the bundle keeps them."""
        return list(self.every_leaf)

    def leaf(self, told: Mapping[str, Any]) -> Leaf:
        facts = dict(told)
        values, sealed = facts.pop("values"), facts["digest"]

        def read() -> np.ndarray:
            if values is None:
                raise NotRecordedError(
                    f"{self.bundle.path.name} holds the digest of {told['path']}, not its values: record with keep='all'"
                )
            return np.asarray(self.bundle.value(values))

        for name in ("kinds", "also", "merged", "shape"):
            facts[name] = tuple(facts[name])
        claims = tuple(Claim(owner, name, tuple(kinds)) for owner, name, kinds in facts.pop("claims"))
        reason = "" if values is not None else f"is known by its digest alone in {self.bundle.path.name}"
        facts |= {"claims": claims, "unreadable": facts["unreadable"] or reason, "digest": "" if values is not None else sealed}
        return Leaf(**facts, read=read, share=lambda axes: read().transpose(axes))

    @cached_property
    def every_layer(self) -> list[Layer]:
        own = {
            told["path"]: {name: self.bundle.value(value, SETTINGS.get(name, Any)) for name, value in told["settings"]}
            for told in self.bundle.facts["layers"]
        }

        def reader(path: str) -> Any:
            def read(name: str) -> Any:
                # `norm1.eps` is a setting of a layer inside.
                inside, _, last = name.rpartition(".")
                return own.get(".".join(filter(None, (path, inside))), {}).get(last)

            return read

        return [
            Layer(
                told["path"],
                tuple(told["kinds"]),
                reader(told["path"]),
                told["own_path"],
                tuple(told["also"]),
                told["by_name"],
                named=lambda path=told["path"]: list(own[path]),
            )
            for told in self.bundle.facts["layers"]
        ]

    def layers(self, value: Any) -> list[Layer]:
        """Every module, with the settings that could be recorded."""
        return list(self.every_layer)

    def kinds(self, value: Any) -> tuple[str, ...]:
        """The classes of the model."""
        return next((layer.kinds for layer in self.every_layer if not layer.path), ())

    def is_model(self, value: Any) -> bool:
        """Whether it is the recorded model."""
        return value is self

    def with_call(self, value: Any, call: Call) -> Any:
        """The model itself."""
        return value

    def model_dtype(self, value: Any) -> str:
        """In which it was recorded."""
        return str(self.bundle.facts["dtype"])

    def x64_enabled(self) -> bool:
        """Whether jax had 64-bit types where it was recorded."""
        return bool(self.bundle.facts["x64"])

    def environment(self) -> dict[str, str]:
        """Versions and devices where it was recorded."""
        facts = self.bundle.facts
        return {
            **facts["environment"],
            **{f"{self.NAME} recorded with {name}": told for name, told in facts["machine"].items()},
        }

    @contextlib.contextmanager
    def pinned(self, *args: Any, **kwargs: Any) -> Iterator[dict[str, str]]:
        """What was pinned where it was recorded."""
        yield dict(self.bundle.facts["pinned"])

    @contextlib.contextmanager
    def flushing(self) -> Iterator[bool]:
        """Whether runs can be made that flush denormal numbers: no run can be made."""
        yield False

    # --- what it does -------------------------------------------------------------------------

    def answered(self, name: str, call: Call, rest: tuple[Any, ...], options: Mapping[str, Any], watch: Any = None) -> Any:
        """What was recorded of one question.

        Raises:
            NotRecordedError: nothing was.
            Exception: what the model raised, under the same name.
        """
        watcher = watch({}) if watch is not None else None
        told = self.bundle.facts["answers"].get(self.questions.asked(name, call, rest, options, watcher))
        if told is None:
            what = TOLD.get(name, "such runs")
            raise NotRecordedError(f"{self.bundle.path.name} does not hold {what}: for that both frameworks are needed")
        if watcher is not None and "watcher" in told:
            vars(watcher).update(self.bundle.value(told["watcher"], dict[str, Any], made=checked_watch))
        if "raises" in told:
            raise error_of(*told["raises"])
        return self.bundle.value(told["returns"], RETURNED.get(name, Any))

    def evaluate(self, value: Any, call: Call, *, watch: Any = None, **options: Any) -> Evaluation:
        """A run that was recorded."""
        found: Evaluation = self.answered("evaluate", call, (), options, watch)
        return found

    def observe(self, value: Any, call: Call, *, keep: Any = None, **options: Any) -> list[ModuleCall]:
        """The calls of all modules; `keep` puts nothing aside that lies in the file already."""
        return list(self.answered("observe", call, (), options))

    def capture(
        self, value: Any, call: Call, *, keep: Any = None, each: Any = None, **options: Any
    ) -> tuple[Evaluation, list[Captured]]:
        """What every module returned, and the model; `keep` puts nothing aside that lies in the file already."""
        calls = self.observe(value, call, **options)
        records = [
            Captured(
                *one.key,
                dict(flatten(one.output, is_array)),
                {number: leaf for number, leaf in enumerate(one.args) if is_array(leaf)},
            )
            for one in calls
        ]
        whole = next((one.outputs for one in records if not one.path), {})
        return Evaluation(whole), records

    def observe_backward(self, value: Any, call: Call, cotangents: Any, **options: Any) -> Any:
        """What came back to every module."""
        return self.answered("observe_backward", call, (cotangents,), options)

    def raises(self, value: Any, call: Call, *rest: Any) -> Any:
        """What it did with arguments: the error, or the shapes of its outputs."""
        return self.answered("raises", call, rest, {})

    def output_dtypes(self, value: Any, call: Call, dtype: str) -> Any:
        """The dtypes of its outputs in another run."""
        return self.answered("output_dtypes", call, (dtype,), {})

    def lookups(self, value: Any, call: Call) -> Any:
        """The tables that it looks ids up in."""
        return self.answered("lookups", call, (), {})

    def random_state(self) -> bytes:
        """The same each time: nothing is drawn."""
        return b""

    def draws(self, value: Any) -> bool:
        """Whether it may draw random numbers: a model that did was not recorded."""
        return False

    def traced(self, value: Any, call: Call) -> Any:
        """The same each time: it was run again where it was recorded."""
        return ""

    def __getattr__(self, name: str) -> Any:
        if name not in RUNS:
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotRecordedError(
                f"{self.bundle.path.name} cannot run its model on other numbers ({name}): for that both frameworks are needed"
            )

        return missing


def checked_watch(told: dict[str, Any]) -> dict[str, Any]:
    """What a watcher knew.

    Raises:
        TypeError: it is nothing that one knows.
    """
    return {name: checked(value, WATCHED.get(name, Any)) for name, value in told.items()}


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def error_of(name: str, text: str, attributes: Mapping[str, Any]) -> Exception:
    """An error as it was raised where the model was recorded."""
    kind = NotProvableError if name == "NotProvableError" else type(name, (Exception,), {})
    error = kind(text)
    vars(error).update(attributes)
    return error
