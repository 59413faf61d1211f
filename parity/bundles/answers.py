"""What a room of a framework answers, by what it was asked: kept while recording, given again while replaying."""

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from parity.bundles.encoding import Encoder
from parity.evidence.calls import Call
from parity.weights.leaf import digest

# Functions of a room that compute: their answers are kept. `capture` follows from `observe`.
ASKED = ("evaluate", "observe", "raises", "output_dtypes", "lookups", "observe_backward")
# What watches a run, and what it knows afterwards.
WATCHERS = {"Prover": ("scores", "unsaturated"), "Kinks": ("near", "exact", "ties", "bounds")}


class Digests:
    """Digests of arrays, each computed once while it is alive."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref[np.ndarray], str]] = {}

    def of(self, array: np.ndarray) -> str:
        """The digest of an array that nobody writes into."""
        held = self.known.get(id(array))
        # Another array may have taken the place of one that is gone.
        if held is None or held[0]() is not array:
            self.known[id(array)] = held = weakref.ref(array), digest(array)
        return held[1]


def key_of(question: Any) -> str:
    """A word for a question: equal for two that are the same."""
    return hashlib.blake2b(json.dumps(question, sort_keys=True).encode(), digest_size=16).hexdigest()


class Questions:
    """Turns what a room is asked into words.

    Arrays are told by their digests, so that the same numbers ask the same on another machine.
    """

    def __init__(self) -> None:
        self.encoder, self.digests = Encoder(), Digests()
        self.calls: dict[int, tuple[Call, str]] = {}

    def asked(self, name: str, call: Call, rest: tuple[Any, ...], options: Mapping[str, Any], watcher: Any = None) -> str:
        """The key of a question about a call."""
        plain = {option: self.spoken(value) for option, value in options.items() if value is not None}
        seen = type(watcher).__name__ if watcher is not None else ""
        return key_of([name, self.of_call(call), self.spoken(rest), plain, seen])

    def of_call(self, call: Call) -> str:
        """A word for the arguments of a model."""
        held = self.calls.get(id(call))
        if held is None or held[0] is not call:
            # Which of its arrays are values does not count: that is for the model to say.
            told = self.spoken([call.args, dict(call.kwargs)])
            self.calls[id(call)] = held = call, key_of(told)
        return held[1]

    def spoken(self, value: Any) -> Any:
        """A value as JSON, its arrays by their digests."""
        if isinstance(value, np.ndarray):
            return self.digests.of(value)
        if isinstance(value, tuple | list):
            return [self.spoken(part) for part in value]
        if isinstance(value, Mapping):
            return {str(key): self.spoken(part) for key, part in value.items()}
        return self.encoder.encoded(value)


class Recording:
    """A room whose answers are kept.

    Everything else is the room's own.

    Args:
        room: of a framework.
    """

    def __init__(self, room: ModuleType):
        self.room, self.questions, self.answers = room, Questions(), dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        if name not in ASKED:
            return getattr(self.room, name)
        if not hasattr(self.room, name):
            raise AttributeError(name)

        def ask(model: Any, call: Call, *rest: Any, watch: Callable[..., Any] | None = None, **options: Any) -> Any:
            watchers: list[Any] = []
            # What is kept goes into the file, and is put aside nowhere else.
            for means in ("keep", "each"):
                options.pop(means, None)

            def noted(names: dict[int, str]) -> Any:
                assert watch is not None
                watchers.append(watch(names))
                return watchers[-1]

            answer: dict[str, Any] = {}
            try:
                more = {"watch": noted} if watch else {}
                answer["returns"] = getattr(self.room, name)(model, call, *rest, **options, **more)
            except Exception as error:
                answer["raises"] = [type(error).__name__, str(error), plain_attributes(error)]
                raise
            finally:
                watcher = watchers[-1] if watchers else None
                if watcher is not None:
                    answer["watcher"] = {of: getattr(watcher, of) for of in WATCHERS[type(watcher).__name__]}
                self.answers[self.questions.asked(name, call, rest, options, watcher)] = answer
            return answer["returns"]

        return ask

    def keep(self, kind: str, call: Call, rest: tuple[Any, ...], answer: Any) -> None:
        """Keep what was made of several runs."""
        self.answers[self.questions.asked(kind, call, rest, {})] = {"returns": answer}


def plain_attributes(error: Exception) -> dict[str, Any]:
    return {name: value for name, value in vars(error).items() if isinstance(value, bool | int | str)}
