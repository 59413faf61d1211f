"""Two bundles compared with NumPy alone."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from parity.bundles.encoding import plain_setting
from parity.bundles.file import Bundle, read
from parity.bundles.recorded import Recorded
from parity.bundles.replay import Replayed, replayed, told_apart
from parity.errors import InputError, NotRecordedError, listed
from parity.evidence.calls import ModuleCall
from parity.evidence.diff import compare_arrays
from parity.evidence.input_sets import InputSet
from parity.evidence.ladder import magnitudes
from parity.evidence.numerics import PRECISION_RULE, UNIT, finite_scale, largest_gap, semantics_bound, wide
from parity.evidence.result import ArrayDiff, Diff, Report
from parity.evidence.sampling import at_same_places, shape_of
from parity.evidence.subject import Subject
from parity.evidence.trees import flatten
from parity.evidence.trial import is_array

# What two recordings of one model must have in common to be compared at all.
SHARED = ("seed", "dtype")


def bundle_diff(expected: str | os.PathLike[str], actual: str | os.PathLike[str]) -> Diff | Report:
    """Compare two recordings where neither framework need be installed.

    Two of one framework are compared leaf by leaf: parameters and arguments bit by bit, what was computed by what
    rounding explains, as the levels `identical` and `native` have it: by the noise that was recorded with `expected`.
    Two of different frameworks are a pair as in `parity.compare`, with both sides recorded: torch's is the expected one.

    Args:
        expected: path of a bundle.
        actual: path of another one, recorded on the same arguments.

    Returns:
        A `Diff` of two recordings of one framework, else a `Report`.

    Raises:
        InputError: a file cannot be used, or the two were recorded with other arguments or another seed.
    """
    first, second = read(expected), read(actual)
    if first.side == second.side:
        return Diff(tuple(leaves(first, second)))
    problems = told_apart(first, second)
    if problems:
        raise InputError(listed(f"{first.path} and {second.path} cannot be compared", problems))
    sides: dict[str, Any] = {
        bundle.side: Recorded(bundle) for bundle in sorted((first, second), key=lambda one: one.side, reverse=True)
    }
    return replayed(sides, None, ("compiled", "eager"))


def leaves(expected: Bundle, actual: Bundle) -> Iterator[ArrayDiff]:
    """Everything that two recordings of one framework hold, in the order of a model's life."""
    for name in SHARED:
        mine, theirs = expected.facts[name], actual.facts[name]
        yield ArrayDiff(
            name, mine == theirs, "" if mine == theirs else f"{theirs}, expected {mine}", actual=theirs, expected=mine
        )
    yield from parameters(expected, actual)
    yield from settings(expected, actual)
    mine_sets, their_sets = ({told["name"]: told for told in bundle.facts["sets"]} for bundle in (expected, actual))
    for name in [*mine_sets, *(n for n in their_sets if n not in mine_sets)]:
        if name not in mine_sets or name not in their_sets:
            yield one_sided(f"input set {name!r}", name in mine_sets)
            continue
        prefix = f"{name}: " if name else ""
        yield from of_set(OneRecording(expected, name), OneRecording(actual, name), prefix)


def one_sided(path: str, expected_has_it: bool) -> ArrayDiff:
    return ArrayDiff(path, False, f"only {'expected' if expected_has_it else 'actual'} has it")


def parameters(expected: Bundle, actual: Bundle) -> Iterator[ArrayDiff]:
    """Every array of the two models, bit by bit, or by its digest."""
    mine, theirs = ({leaf["path"]: leaf for leaf in bundle.facts["leaves"] if leaf["digest"]} for bundle in (expected, actual))
    for path in [*mine, *(p for p in theirs if p not in mine)]:
        if path not in mine or path not in theirs:
            yield one_sided(f"array {path}", path in mine)
            continue
        a, b = theirs[path], mine[path]
        if a["digest"] == b["digest"]:
            yield ArrayDiff(f"array {path}", True, elements=int(np.prod(b["shape"])))
        elif a["values"] and b["values"]:
            yield compare_arrays(f"array {path}", actual.value(a["values"]), expected.value(b["values"]), {})
        else:
            yield ArrayDiff(f"array {path}", False, "some bits differ: a bundle knows it by its digest alone")


def settings(expected: Bundle, actual: Bundle) -> Iterator[ArrayDiff]:
    """The layers of which a setting is another."""
    mine, theirs = (
        {
            f"{layer.path or 'the model'}: {name}": layer.settings(name)
            for layer in Recorded(bundle).layers(None)
            for name in layer.named()
        }
        for bundle in (expected, actual)
    )
    for path in [*mine, *(p for p in theirs if p not in mine)]:
        a, b = theirs.get(path), mine.get(path)
        if plain_setting(a) and plain_setting(b) and a != b:
            yield ArrayDiff(f"setting {path}", False, f"{a!r}, expected {b!r}", actual=a, expected=b)


def of_set(expected: "OneRecording", actual: "OneRecording", prefix: str) -> Iterator[ArrayDiff]:
    """What two models were given, and what came of it."""
    mine, theirs = expected.given, actual.given
    for path in [*mine, *(p for p in theirs if p not in mine)]:
        where = f"{prefix}argument {path}"
        if path not in mine or path not in theirs:
            yield one_sided(where, path in mine)
        elif is_array(mine[path]) and is_array(theirs[path]):
            yield compare_arrays(where, theirs[path], mine[path], {})
        else:
            same = type(mine[path]) is type(theirs[path]) and bool(mine[path] == theirs[path])
            yield ArrayDiff(where, same, "" if same else f"{theirs[path]!r}, expected {mine[path]!r}")
    for kind, tell in expected.computed.items():
        others = actual.computed[kind]
        for path in [*tell, *(p for p in others if p not in tell)]:
            where = f"{prefix}{kind} {path}".rstrip()
            if path not in tell or path not in others:
                yield one_sided(where, path in tell)
            else:
                yield compared(where, others[path].array, tell[path])


@dataclass(frozen=True)
class Known:
    """One array of a recording.

    Attributes:
        array: of which it is; anything else that a model returned.
        bound: how far another one may be from it.
    """

    array: Any
    bound: float


def compared(where: str, actual: Any, known: Known) -> ArrayDiff:
    """One array of both recordings."""
    expected = known.array
    if not is_array(actual) or not is_array(expected):
        same = is_array(actual) == is_array(expected) and bool(actual == expected)
        return ArrayDiff(where, same, "" if same else f"{kind_of(actual)}, expected {kind_of(expected)}")
    if shape_of(actual) != shape_of(expected):
        return ArrayDiff(where, False, f"shape {shape_of(actual)}, expected {shape_of(expected)}")
    return compare_arrays(where, *at_same_places(actual, expected), {"atol": known.bound})


def kind_of(value: Any) -> str:
    return f"an array {shape_of(value)}" if is_array(value) else repr(value)


class OneRecording(Replayed):
    """One input set of one recording, with nothing on the other side."""

    def __init__(self, bundle: Bundle, name: str):
        side = Recorded(bundle)
        self.open(side, one=InputSet(name, "", (), {}))
        self.recorded = frozenset((bundle.side,))
        self.torch = self.flax = side
        self.torch_model = self.flax_model = side

    @cached_property
    def given(self) -> dict[str, Any]:
        """The arguments, by path."""
        leaves = [*flatten(self.call.args, is_array, "args"), *flatten(dict(self.call.kwargs), is_array, "kwargs")]
        return dict(leaves)

    @cached_property
    def runs(self) -> tuple[Any, Any]:
        """The run in the model's dtype, and that in float64."""
        if self.torch.NAME == "torch":
            return Subject.torch_native.func(self), Subject.torch_whole.func(self)  # type: ignore[attr-defined]
        plain = self.flax.evaluate(self.flax_model, self.call)
        given = self.cotangents_for(plain) if self.gradients else None
        native = self.flax.evaluate(self.flax_model, self.call, cotangents=given)
        return native, self.flax.evaluate(self.flax_model, self.call, dtype="float64", cotangents=given, quick=True)

    @cached_property
    def computed(self) -> dict[str, dict[str, Known]]:
        """Outputs, gradients and what modules returned, each with what may be between it and another recording of it."""
        native, whole = self.runs
        found = {
            "output": {path: Known(array, self.native_bound(path, array, whole)) for path, array in native.outputs.items()}
        }
        found["output in float64"] = {
            path: Known(array, bound(native.outputs.get(path), array, own=self.own_noise("outputs", path)))
            for path, array in whole.floats.items()
        }
        scales = magnitudes(whole.gradients)
        found["gradient of"] = {
            path: Known(array, bound(native.gradients.get(path), array, scales[path], self.own_noise("gradients", path)))
            for path, array in whole.gradients.items()
        }
        found["module"] = dict(self.modules())
        return found

    def own_noise(self, kind: str, path: str) -> float:
        """How well float64 knows an array, where that was measured."""
        return max(self.wide_noise(kind, path), default=0.0) if self.torch.NAME == "torch" else 0.0

    def native_bound(self, path: str, array: Any, whole: Any) -> float:
        """How far a run in the model's dtype may be from this one: its error is within the noise of this one's."""
        oracle = whole.outputs.get(path)
        if not is_array(array) or not is_array(oracle) or "float" not in str(array.dtype):
            return 0.0
        noise = largest_gap(array, oracle)
        if self.torch.NAME == "torch":
            noise = max(self.noise("ensemble", "outputs", path).largest, default=noise)
        factor, floor, *_ = PRECISION_RULE[self.dtype]
        # The other one's error beside this one's own.
        return (factor + 1) * noise + floor * UNIT[self.dtype] * finite_scale(oracle)

    def observed(self, dtype: str | None) -> list[ModuleCall]:
        """The calls of modules that the bundle keeps."""
        try:
            return list(self.torch.observe(self.torch_model, self.call, dtype=dtype))
        except NotRecordedError:
            return []

    def modules(self) -> Iterator[tuple[str, Known]]:
        """What every module returned in float64, by its path and call."""
        plain = {one.key: one for one in self.observed(None)}
        for one in self.observed("float64"):
            noise = dict(flatten(plain[one.key].output, is_array)) if one.key in plain else {}
            for path, leaf in flatten(one.output, is_array):
                name = f"{one.path or 'the model'}{f' (call {one.call + 1})' if one.call else ''}: output {path}".rstrip()
                yield name, Known(leaf, bound(noise.get(path), leaf))


def bound(native: Any, whole: Any, scale: float | None = None, own: float = 0.0) -> float:
    """What rounding explains between a float64 array and another recording of it."""
    if not is_array(whole) or "float" not in str(whole.dtype):
        return 0.0
    plain = native if is_array(native) and shape_of(native) == shape_of(whole) else whole
    return semantics_bound(wide(np.asarray(plain)), wide(np.asarray(whole)), scale, own)
