"""Every module call of a Linen model on the record, and one module run by itself on what it is told to take."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parity.evidence.calls import Alone, Call, Evaluation, ModuleCall
from parity.evidence.shelf import copied
from parity.evidence.trial import NotComparableError
from parity.frameworks.jax.isolation import Around, Replies, answered, observed
from parity.frameworks.jax.recording import Recorder
from parity.frameworks.jax.running import pinned
from parity.frameworks.linen.capture import watching, words_of
from parity.frameworks.linen.leaves import flat
from parity.frameworks.linen.running import Applied, evaluate, nested, prepare, reseeded, widened
from parity.frameworks.linen.structure import Part, Path, Structure
from parity.linen import Linen


@dataclass(frozen=True, eq=False)
class WatchedModule(Applied):
    """A Linen model without its arrays, each call of whose modules can be watched.

    Attributes:
        lifted: as of `Structure`.
    """

    lifted: tuple[type, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for programs that do the same."""
        return (*super().key, self.lifted)

    def watched(self, parameters: Any, rest: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], around: Around) -> Any:
        """What the model returns, when the call of every module, its own as '', is sent through `around`."""

        def whole(*args: Any, **kwargs: Any) -> Any:
            return self.call(parameters, rest, args, kwargs)

        def named(path: Path, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return around(".".join(path), call, args, kwargs)

        with watching(self.lifted, named):
            return around("", whole, args, kwargs)


def watched(program: Any, structure: Structure) -> WatchedModule:
    """A program of `prepare` whose modules can be watched."""
    return WatchedModule(program.module, program.method, program.wide, structure.lifted)


def observe(
    model: Linen, call: Call, *, dtype: str | None = None, keep: Callable[[np.ndarray], Any] = copied
) -> list[ModuleCall]:
    """Run a model once and record every call of every submodule, in the order in which they finish.

    What runs inside a transformation of jax (a scanned cell) has no value outside of it and is left out.

    Args:
        model: left as it is.
        call: the arguments, in NumPy.
        dtype: as of `evaluate`.
        keep: as of `capture`.
    """
    with pinned(double=dtype == "float64"), widened(model, dtype):
        program, parameters, rest, arguments = prepare(model, call, dtype, None)
        records = observed(watched(program, model.structure), parameters, rest, arguments, keep)
    words = {".".join(path): words_of(model, path) for path in model.structure.parts}

    def renamed(one: ModuleCall) -> ModuleCall:
        inside = one.inside and (words.get(one.inside[0], one.inside[0]), one.inside[1])
        # What the Flax model alone is told, such as train=False, is no argument of the pair.
        kwargs = one.kwargs if one.path else {name: one.kwargs[name] for name in call.kwargs}
        return replace(one, path=words.get(one.path, one.path), kwargs=kwargs, inside=inside)

    return [renamed(one) for one in records]


def alone(
    model: Linen,
    path: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    replies: Replies | None = None,
    *,
    dtype: str | None = "float64",
    weights: Mapping[str, np.ndarray] | None = None,
    reseed: int = 0,
    quick: bool = True,
    settings: Mapping[str, Any] | None = None,
    watch: Recorder | None = None,
) -> Alone:
    """Run one submodule by itself; modules below that have replies answer with those.

    Args:
        model: left as it is.
        path: of the submodule, in torch's words.
        args: its positional arguments, arrays in NumPy in the dtype of the run.
        kwargs: its keyword arguments likewise; to the whole model those that it has of its own are given too.
        replies: by the path, in the model, of a module below. A reply that does not fit what the
            module returns is not used.
        dtype: floating point variables are cast to it; None keeps the model's.
        weights: arrays in place of variables, by their path in the model, in Flax's words.
        reseed: other than 0 gives other random keys. A module that draws draws other numbers than in the model.
        quick: compile with little optimisation; the last bits may differ from those that users see.
        settings: attributes of the submodule to run with instead.
        watch: sees every operation.

    Raises:
        NotComparableError: there is no copy of the submodule that could be run by itself.
    """
    replies = replies or {}
    paths = {part.words: own for own, part in reversed(model.structure.parts.items())}
    with pinned(double=dtype == "float64"), widened(model, dtype):
        structure = model.wide_structure if dtype == "float64" else model.structure
        one = submodel(model, path, paths.get(path), structure, settings or {})
        below = {name: child for child in replies for name in one.names(paths.get(child))}
        own = {name: weights[old] for name, old in one.variables.items() if weights and old in weights}
        program, parameters, rest, arguments = prepare(one.model, Call(args, kwargs), dtype, own)
        rest["rngs"] = reseeded(rest["rngs"], reseed) if reseed else rest["rngs"]
        return answered(watched(program, structure), parameters, rest, arguments, below, replies, quick=quick, watch=watch)


@dataclass(frozen=True)
class Submodel:
    """One module of a model as a model of its own.

    Attributes:
        model: an unbound copy of the module, with its part of every collection.
        places: by a path inside it, where that lies in the whole model: itself, and modules that it is given
            from elsewhere.
        variables: by the path of an array in it, that in the whole model.
    """

    model: Linen
    places: Mapping[Path, Path]
    variables: Mapping[str, str]

    def names(self, path: Path | None) -> list[str]:
        """The paths inside it of a module of the whole model."""
        return [
            ".".join((*inner, *path[len(whole) :]))
            for inner, whole in self.places.items()
            if path is not None and path[: len(whole)] == whole
        ]


def submodel(model: Linen, words: str, path: Path | None, structure: Structure, settings: Mapping[str, Any]) -> Submodel:
    """One module of a model as a model of its own; `words` name it in errors.

    Raises:
        NotComparableError: there is no copy of it that could be run by itself.
    """
    part = None if path is None else structure.parts.get(path)
    module: Any = model.module if path == () else part and part.module
    if path is None or module is None:
        reason = part.why_not if part else Part.why_not
        raise NotComparableError(f"the Flax module {words} {reason}, so it cannot be run by itself")
    where, values = places(structure.parts, path), flat(model.variables)
    arrays = {
        (keys[0], *inner, *keys[1 + len(whole) :]): keys
        for keys in values
        for inner, whole in where.items()
        if keys[1 : 1 + len(whole)] == whole
    }
    variables = {"params": {}, **nested({new: values[old] for new, old in arrays.items()})}
    options: dict[str, Any] = {"method": model.method, **model.kwargs} if path == () else {}
    own = Linen(module.clone(**settings) if settings else module, variables, rngs=model.rngs, **options)
    return Submodel(own, where, {".".join(new): ".".join(old) for new, old in arrays.items()})


def places(parts: Mapping[Path, Part], path: Path) -> dict[Path, Path]:
    """Where a module and those that it is given lie in the whole model, by their paths inside a copy of it."""
    given = parts[path].given if path in parts else {}
    return {(): path} | {(name, *inner): at for name, child in given.items() for inner, at in places(parts, child).items()}


def pulled_back(
    model: Linen, path: str, call: Call, cotangents: Mapping[str, np.ndarray], *, dtype: str | None = "float64"
) -> Evaluation:
    """Run one submodule by itself forwards and backwards; gradients of its arrays under their paths in the model.

    Args:
        model: left as it is.
        path: of the submodule, in torch's words.
        call: its arguments, arrays in NumPy.
        cotangents: by output path.
        dtype: of the run; None is the model's.

    Raises:
        NotComparableError: there is no copy of the submodule that could be run by itself.
    """
    paths = {part.words: own for own, part in reversed(model.structure.parts.items())}
    with pinned(double=dtype == "float64"), widened(model, dtype):
        structure = model.wide_structure if dtype == "float64" else model.structure
        one = submodel(model, path, paths.get(path), structure, {})
        found = evaluate(one.model, call, dtype=dtype, cotangents=cotangents, quick=True)
    return Evaluation(found.outputs, {one.variables.get(name, name): g for name, g in found.gradients.items()})
