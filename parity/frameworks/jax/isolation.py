"""Calls of modules on the record, and one module run on what it is told to take: what NNX and Linen have in common."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from parity.evidence.calls import Alone, ModuleCall
from parity.evidence.trees import flatten, mapped
from parity.frameworks.jax.arrays import is_array
from parity.frameworks.jax.pieces import in_pieces
from parity.frameworks.jax.recording import Recorder
from parity.frameworks.jax.running import Arguments, Frozen, Slot, compile_body, hashable, remembered
from parity.frameworks.source_lines import caller

# What a module below answers, by its path: for each of its calls, arrays by path in what it returns.
Replies = Mapping[str, list[Mapping[str, np.ndarray]]]
# What a call is sent through: `around(path, call, args, kwargs)` returns what the caller gets.
Around = Callable[[str, Callable[..., Any], Any, Any], Any]


class Watched(Hashable, Protocol):
    """A model without its arrays whose modules can be watched. One without a hash is made anew for each run."""

    def watched(self, parameters: Any, rest: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], around: Around) -> Any:
        """What the model returns, when the call of every module, its own as '', is sent through `around`."""


def arguments_of(skeleton: Frozen, arrays: Mapping[str, Any]) -> Any:
    """Arguments with arrays in the place of their slots."""
    return mapped(lambda _, leaf: arrays[leaf.path] if isinstance(leaf, Slot) else leaf, skeleton.tree)


def observed(
    program: Watched, parameters: Any, rest: Any, arguments: Arguments, keep: Callable[[np.ndarray], Any]
) -> list[ModuleCall]:
    """Every call of every module in one run, in the order in which they finish; `keep` as of `capture`."""
    records: list[ModuleCall] = []

    def body(parameters: Any, rest: Any, arrays: Any) -> list[Any]:
        records.clear()
        kept: list[Any] = []
        args, kwargs = arguments_of(arguments.skeleton, arrays)
        program.watched(parameters, rest, args, kwargs, Observer(records, kept).around)
        return kept

    given = parameters, rest, {**arguments.values, **arguments.others}
    try:
        known = in_pieces(body, given, keep)
    except Exception:
        # A model that decides by values cannot be compiled.
        known = [keep(np.asarray(array)) for array in body(*given)]
    return [filled(one, known) for one in records]


class Observer:
    """Puts calls on the record, with a `Slot` for every array: those leave a compiled program apart."""

    def __init__(self, records: list[ModuleCall], kept: list[Any]):
        self.records, self.kept = records, kept
        self.counts: dict[str, int] = {}
        self.open: list[tuple[str, int]] = []

    def around(self, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.counts[path] = self.counts.get(path, 0) + 1
        key, inside = (path, self.counts[path] - 1), self.open[-1] if self.open else None
        given, line = (self.slots(tuple(args)), self.slots(dict(kwargs))), caller()
        self.open.append(key)
        try:
            output = original(*args, **kwargs)
        finally:
            self.open.pop()
        self.records.append(ModuleCall(*key, *given, self.slots(output), inside, line))
        return output

    def slots(self, tree: Any) -> Any:
        def slot(_: str, leaf: Any) -> Any:
            if not is_array(leaf):
                return leaf
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return None
            self.kept.append(leaf)
            return Slot(str(len(self.kept) - 1))

        return mapped(slot, tree)


def filled(one: ModuleCall, arrays: list[Any]) -> ModuleCall:
    """A record with arrays, or what stands for them, in the place of its slots."""

    def fill(tree: Any) -> Any:
        return mapped(lambda _, leaf: arrays[int(leaf.path)] if isinstance(leaf, Slot) else leaf, tree)

    return replace(one, args=fill(one.args), kwargs=fill(one.kwargs), output=fill(one.output))


def answered(
    program: Watched,
    parameters: Any,
    rest: Any,
    arguments: Arguments,
    below: Mapping[str, str],
    replies: Replies,
    *,
    quick: bool,
    watch: Recorder | None = None,
) -> Alone:
    """Run a module, the modules below it answering with replies.

    Args:
        program: the module.
        parameters: its arrays.
        rest: what else it holds.
        arguments: of its call.
        below: names in `replies`, by the path inside the program. Those inside a program are the same in
            every layer, so that a program is compiled once for all of them.
        replies: what they answer. A reply that does not fit what the module returns is not used.
        quick: compile with little optimisation; the last bits may differ from those that users see.
        watch: runs it equation by equation instead, and sees each.
    """
    told = {
        f"{relative}#{number}{leaf}": jnp.asarray(array)
        for relative, child in below.items()
        for number, reply in enumerate(replies[child])
        for leaf, array in reply.items()
    }
    spec = tuple(sorted((relative, len(replies[child])) for relative, child in below.items()))
    make = answering if hashable(program) else answering.__wrapped__
    body = make(program, arguments.skeleton, spec)
    given = parameters, rest, {**arguments.values, **arguments.others}, told
    try:
        outputs, arrays = watch.run(body, given) if watch else compile_body(body, quick)(*given)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        if watch:
            raise
        outputs, arrays = body(*given)
    found: dict[tuple[str, int, str], Any] = {}
    for name, value in {**body.settings, **arrays}.items():  # type: ignore[attr-defined]
        relative, _, end = name.partition("#")
        number, _, leaf = end.partition(" ")
        found[below[relative], int(number), leaf] = np.array(value) if is_array(value) else value
    plain = {name: np.array(value) for name, value in outputs.items()}
    # One that is called under one of several paths is seen under that one.
    seen = dict.fromkeys(below.values(), 0)
    for relative, count in body.seen.items():  # type: ignore[attr-defined]
        seen[below[relative]] += count
    return Alone({**body.statics, **plain}, found, seen)  # type: ignore[attr-defined]


@remembered
def answering(program: Watched, skeleton: Frozen, spec: tuple[tuple[str, int], ...]) -> Callable[..., Any]:
    """A module as a pure function of parameters, arguments and the replies of the modules in `spec`."""

    def body(parameters: Any, rest: Any, arrays: dict[str, Any], told: dict[str, Any]) -> tuple[Any, Any]:
        args, kwargs = arguments_of(skeleton, arrays)
        seen, given, settings = dict.fromkeys((name for name, _ in spec), 0), dict[str, Any](), dict[str, Any]()

        def around(path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if path not in seen:
                return original(*args, **kwargs)
            number, seen[path] = seen[path], seen[path] + 1
            for name, leaf in (*flatten(tuple(args), is_array, "args"), *flatten(dict(kwargs), is_array, "kwargs")):
                (given if is_array(leaf) else settings)[f"{path}#{number} {name}"] = leaf

            def reply(name: str, leaf: Any) -> Any:
                answer = told.get(f"{path}#{number}{name}")
                fits = answer is not None and is_array(leaf) and answer.shape == leaf.shape
                return answer.astype(dtype_of_answer(answer, leaf)) if fits and answer is not None else leaf

            return mapped(reply, original(*args, **kwargs))

        found = dict(flatten(program.watched(parameters, rest, args, kwargs, around), is_array))
        body.seen, body.settings = seen, settings  # type: ignore[attr-defined]
        # Numbers, strings and None cannot leave a traced function as results.
        body.statics = {name: leaf for name, leaf in found.items() if not is_array(leaf)}  # type: ignore[attr-defined]
        return {name: leaf for name, leaf in found.items() if is_array(leaf)}, given

    return body


def dtype_of_answer(answer: Any, leaf: Any) -> Any:
    """That of what a module returns; a floating point answer is not cut to what a wrong module pins."""
    floating = all(jnp.issubdtype(one.dtype, jnp.floating) for one in (answer, leaf))
    return jnp.promote_types(answer.dtype, leaf.dtype) if floating else leaf.dtype
