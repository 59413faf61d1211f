"""Another array than torch's in the same place: arguments exchanged, a residual forgotten, a factor, other axes."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from parity.evidence.calls import ModuleCall, fingerprint
from parity.evidence.hypotheses.suspect import Suspect, Values, Variant
from parity.evidence.trial import Place, by_argument, is_array


def floats(suspect: Suspect) -> list[Place]:
    """The differing places at which both sides have numbers of one shape."""
    expected, actual = suspect.trial.expected, suspect.trial.actual
    return [
        place
        for place in suspect.differing
        if is_array(expected.get(place)) and is_array(actual.get(place)) and expected[place].dtype.kind == "f"
    ]


def known_values(suspect: Suspect) -> list[tuple[str, np.ndarray]]:
    """What is at hand, the same numbers under their first name only."""
    found: list[tuple[str, np.ndarray]] = []
    for name, array in suspect.known():
        if array.dtype.kind == "f" and not any(a.shape == array.shape and np.array_equal(a, array) for _, a in found):
            found.append((name, array))
    return found


def another_value(suspect: Suspect) -> Iterator[Variant]:
    """What stands there is another value that the module has at hand."""
    known = known_values(suspect)
    for source, places in by_source(suspect, known).items():
        shape = suspect.trial.expected[places[0]].shape
        for name, array in known:
            if array.shape == shape and name != source:
                here = f" in place of {source}" if source else ""
                change = f"give it {source or 'what torch does'}"
                yield Variant(f"{listed(places)} is {name}{here}", change, at_all(dict.fromkeys(places, array)))
                for place in places if len(places) > 1 else ():
                    yield Variant(f"{place} is {name}{here}", change, at(place, array))


def not_given(suspect: Suspect) -> Iterator[Variant]:
    """Arguments that torch gives a module and Flax does not, as the context of an attention that then attends to itself."""
    missing = [p for p in suspect.differing if p.child is not None and is_array(suspect.trial.expected.get(p))]
    missing = [p for p in missing if p not in suspect.trial.actual and not given_twice(suspect, p)]
    known = known_values(suspect)
    for child in dict.fromkeys(place.child for place in missing):
        places = [place for place in missing if place.child == child]
        said = [f"{p.path} ({source})" if (source := source_of(suspect, p, known)) else p.path for p in places]
        yield Variant(
            f"Flax gives {child} no {' and no '.join(said)}",
            f"give {child} what torch gives it: {', '.join(said)}",
            at_all(dict.fromkeys(places)),
        )


def given_twice(suspect: Suspect, place: Place) -> bool:
    """Whether torch gives a module the same once more, where Flax gives something: a layer may take values to be its keys."""
    trial = suspect.trial
    alike = [other for other in trial.expected if other.child == place.child and other.call == place.call and other != place]
    alike = [other for other in alike if other in trial.actual and is_array(trial.expected[other])]
    return any(array_equal(trial.expected[other], trial.expected[place]) for other in alike)


def source_of(suspect: Suspect, place: Place, known: list[tuple[str, np.ndarray]]) -> str:
    """What stands at a place in torch, among what the module has at hand; '' for what is none of that."""
    mine = suspect.trial.expected[place]
    return next((name for name, array in known if not name.startswith("what") and array_equal(array, mine)), "")


def another_operand(suspect: Suspect) -> Iterator[Variant]:
    """An operation takes another value at hand than in torch."""
    known = known_values(suspect)
    names = {fingerprint(array): (name, array) for name, array in known}
    for op in suspect.operations:
        for path, number in op.operands.items():
            source, mine = names.get(number, ("", None))
            for name, array in known if mine is not None else ():
                if mine is not None and array.shape == mine.shape and name != source:
                    yield Variant(
                        f"{op.name.strip('_')} takes {name} in place of {source}",
                        f"give it {source}",
                        suspect.edited([op], "substituted", path=path, value=array),
                    )


def part_of_a_value(suspect: Suspect) -> Iterator[Variant]:
    """Another position, or another summary, along one axis of a value: the first step for the last, a mean for a maximum."""
    known = known_values(suspect)
    for place in floats(suspect):
        mine = suspect.trial.expected[place]
        for name, array in known:
            for axis in range(array.ndim):
                if array.shape[:axis] + array.shape[axis + 1 :] != mine.shape:
                    continue
                last = array.shape[axis] - 1
                parts = {f"position {i}": np.take(array, i, axis) for i in range(min(last, MANY))}
                parts["the last position"] = np.take(array, last, axis)
                parts |= {"the mean": array.mean(axis), "the sum": array.sum(axis), "the maximum": array.max(axis)}
                torchs = next((part for part, value in parts.items() if np.array_equal(value, mine)), "")
                source = f"{torchs} there" if torchs else "what torch does"
                # Where torch takes no part of it either, it is another value that is wrong, and a part of that is taken.
                cause = "" if torchs else "another value"
                for part, value in parts.items():
                    if not np.array_equal(value, mine):
                        what = f"{place} is {part} along axis {axis} of {name}"
                        yield Variant(what, f"take {source}", at(place, value), name=cause)


def by_source(suspect: Suspect, known: list[tuple[str, np.ndarray]]) -> dict[str, list[Place]]:
    """The differing places by the name of what stands there in torch, '' for what has none, one by one."""
    found: dict[str, list[Place]] = {}
    nameless = []
    for place in floats(suspect):
        mine = suspect.trial.expected[place]
        source = next((name for name, array in known if array.shape == mine.shape and np.array_equal(array, mine)), "")
        if source:
            found.setdefault(source, []).append(place)
        else:
            nameless.append(place)
    return found | ({"": nameless[:1]} if nameless else {})


def answering(suspect: Suspect) -> list[ModuleCall]:
    """The calls below that return one array of floating point numbers."""
    calls = [suspect.isolator.calls[key] for key in suspect.isolator.children.get(suspect.trial.torch.key, ())]
    return [one for one in calls if is_array(one.output) and one.output.dtype.kind == "f"]


def given(one: ModuleCall) -> np.ndarray | None:
    """The only array that a module is given."""
    arrays = [arg for arg in one.args if is_array(arg) and arg.dtype.kind == "f"]
    return arrays[0] if len(arrays) == 1 else None


def array_equal(a: np.ndarray | None, b: np.ndarray) -> bool:
    return a is not None and a.shape == b.shape and np.array_equal(a, b)


def listed(places: list[Place]) -> str:
    return str(places[0]) + (f" (and {len(places) - 1} more)" if len(places) > 1 else "")


def norm_placement(suspect: Suspect) -> Iterator[Variant]:
    """A module is given what a norm is given, not what the norm returns, or the other way round."""
    layers = suspect.isolator.torch_layers
    norms = [
        suspect.isolator.calls[key]
        for key in suspect.isolator.children.get(suspect.trial.torch.key, ())
        if "norm" in layers[key[0]].kinds[0].lower()
    ]
    for one in norms:
        if not is_array(one.output) or not one.args or not is_array(one.args[0]):
            continue
        for here, there, word in ((one.output, one.args[0], "before"), (one.args[0], one.output, "behind")):
            places = [
                place
                for place in floats(suspect)
                if place.child != one.path and here.shape == there.shape == suspect.trial.expected[place].shape
                if np.array_equal(suspect.trial.expected[place], here)
            ]
            for chosen in [places, *([p] for p in places if len(places) > 1)] if places else []:
                side = "what that is given" if word == "before" else "what that returns"
                what = f"{listed(chosen)} is taken {word} {one.path}: it is {side}"
                yield Variant(what, f"apply {one.path} where torch does", at_all(dict.fromkeys(chosen, there)))


def exchanged(suspect: Suspect) -> Iterator[Variant]:
    """Arguments of one shape taken for each other: the module's own, or what it gives others and returns."""
    arrays = {p: a for p, a in by_argument(suspect.trial.torch).items() if a.dtype.kind == "f" and p.startswith("args[")}
    paths = [p for p in arrays if p.count("[") == 1]
    alike = [(p, o) for p, o in itertools.permutations(paths, 2) if arrays[p].shape == arrays[o].shape]
    orders = [dict(zip(paths, order)) for order in itertools.permutations(paths)] if len(paths) <= 4 else []
    moves = [{p: o for p, o in order.items() if p != o} for order in orders]
    for moved in [*(m for m in moves if m and all(pair in alike for pair in m.items())), *({p: o} for p, o in alike)]:
        new = list(suspect.trial.torch.args)
        for path, other in moved.items():
            new[int(path[5:-1])] = arrays[other]
        said = ", ".join(told_taken(p, o, moved) for p, o in moved.items() if p < o or moved.get(o) != p)
        yield Variant(said, "use the arguments in torch's order", lambda args=tuple(new): suspect.again(args=args))
    yield from exchanged_places(suspect)


def told_taken(place: str, other: str, moved: Mapping[str, str]) -> str:
    """`other` stands at `place`; of two that are exchanged the first is named first."""
    return f"{place} is taken for {other}" if moved.get(other) == place else f"{other} is taken for {place}"


def exchanged_places(suspect: Suspect) -> Iterator[Variant]:
    """Two or three values that differ, each where torch has another of them."""
    by_shape: dict[tuple[int, ...], list[Place]] = {}
    for place in floats(suspect):
        by_shape.setdefault(suspect.trial.expected[place].shape, []).append(place)
    for alike in by_shape.values():
        for count in (2, 3) if len(alike) <= FEW else (2,) if len(alike) <= MANY else ():
            for chosen in itertools.combinations(alike, count):
                for order in itertools.permutations(chosen):
                    if all(a != b for a, b in zip(chosen, order)):
                        said = ", ".join(f"what belongs at {b} stands at {a}" for a, b in zip(chosen, order))
                        found = {a: suspect.trial.expected[b] for a, b in zip(chosen, order)}
                        name = reordered_modules(suspect, chosen)
                        what, change = f"values are exchanged: {said}", "exchange them back"
                        if name:
                            what, change = f"modules are called in another order: {said}", "call them in torch's order"
                        yield Variant(what, change, at_all(found), whole=True, name=name)


def reordered_modules(suspect: Suspect, places: Sequence[Place]) -> str:
    """What values that are exchanged are called if one is made of another: modules in a row in another order; '' if none is."""
    layers, calls = suspect.isolator.torch_layers, suspect.isolator.calls
    below = [calls[key] for key in suspect.isolator.children.get(suspect.trial.torch.key, ())]
    answers = [one for one in below if is_array(one.output) and any(one.path == place.child for place in places)]
    moved = [one for one in answers if any(np.array_equal(suspect.trial.expected[p], one.output) for p in places)]
    if not moved:
        return ""
    return "norm placement" if any("norm" in layers[one.path].kinds[0].lower() for one in moved) else "order of modules"


def residual(suspect: Suspect) -> Iterator[Variant]:
    """A value that torch adds is not added, is added twice, or another is added in its place."""
    known = known_values(suspect)
    expected = {place: suspect.trial.expected[place] for place in floats(suspect)}
    for name, array in known:
        same = {place: mine for place, mine in expected.items() if mine.shape == array.shape}
        if same:
            # Several together, or each by itself: one may lack what another has twice.
            for chosen in [list(same), *([place] for place in same if len(same) > 1)]:
                where = listed(chosen)
                less = {place: same[place] - array for place in chosen}
                what = f"{where} lacks {name}: a residual is not added"
                yield Variant(what, f"add {name}", at_all(less), whole=len(chosen) > 1)
                more = {place: same[place] + array for place in chosen}
                what = f"{where} has {name} once too often"
                yield Variant(what, f"add {name} once", at_all(more), whole=len(chosen) > 1)
    # A module that is not applied is told by itself: what it is given is added where torch adds what it returns.
    applied = [(given(one), one.output) for one in answering(suspect)]
    for (name, array), (other, instead) in itertools.permutations(known, 2) if len(known) <= MANY else ():
        if any(array_equal(before, instead) and np.array_equal(after, array) for before, after in applied):
            continue
        same = {
            place: mine - array + instead
            for place, mine in expected.items()
            if mine.shape == array.shape == instead.shape and not np.array_equal(mine, array)
        }
        if same:
            what = f"{listed(list(same))} has {other} added where torch adds {name}"
            yield Variant(what, f"add {name}", at_all(same))


def known_term(suspect: Suspect) -> Iterator[Variant]:
    """A sum of which one term is a value at hand, and is not added."""
    names = {fingerprint(array): name for name, array in known_values(suspect)}
    for op in suspect.named("add"):
        for path, edit in (((0,), "other operand"), ((1,), "left out")):
            name = names.get(op.operands.get(path, -1))
            if name and len(op.shapes) == 2 and op.shapes[0] == op.shapes[1]:
                what = f"{name} is not added: a residual is left out"
                yield Variant(what, f"add {name}", suspect.edited([op], edit))


# Values beyond which they are not tried in pairs, and those beyond which not by threes.
MANY, FEW = 16, 6


def factor(suspect: Suspect) -> Iterator[Variant]:
    """All of a value is torch's times one number, or shifted by one."""
    for place in floats(suspect):
        mine, theirs = suspect.trial.expected[place], suspect.trial.actual[place]
        if mine.shape != theirs.shape or not np.isfinite(mine).all() or not np.isfinite(theirs).all():
            continue
        size = float((mine * mine).sum())
        ratio = float((mine * theirs).sum()) / size if size else 1.0
        if ratio and not math.isclose(ratio, 1, rel_tol=1e-12):
            name = named_factor(ratio, mine.shape)
            yield Variant(
                f"{place} is {name} times torch's",
                f"multiply by {named_factor(1 / ratio, mine.shape)}",
                at(place, mine * ratio),
            )
        shift = float((theirs - mine).mean()) if mine.size > 1 else 0.0
        if shift:
            yield Variant(f"{place} is torch's plus {shift:.6g}", f"subtract {shift:.6g}", at(place, mine + shift))


def named_factor(number: float, shape: tuple[int, ...]) -> str:
    """A factor in the words of sizes where it is one: `sqrt(8)`, `2 (sqrt(4))`."""
    for size in dict.fromkeys([*sorted(set(shape), reverse=True), *range(2, 4097)]):
        for value, name in ((size**0.5, f"sqrt({size})"), (size**-0.5, f"1/sqrt({size})")):
            if size > 1 and math.isclose(number, value, rel_tol=1e-9):
                return name if float(f"{number:.6g}") != value else f"{number:.6g} ({name})"
    short = f"{number:.6g}"
    return f"(1 {number - 1:+.3g})" if short == "1" else short


def axes(suspect: Suspect) -> Iterator[Variant]:
    """The same numbers in other places: axes exchanged, turned round, or read in another order."""
    for place in floats(suspect):
        mine, theirs = suspect.trial.expected[place], suspect.trial.actual[place]
        if mine.size != theirs.size or mine.ndim > 5:
            continue
        for order in itertools.permutations(range(mine.ndim)):
            if order == tuple(range(mine.ndim)):
                continue
            turned = mine.transpose(order)
            if turned.shape == theirs.shape:
                yield Variant(f"{place} has torch's axes in the order {order}", "transpose them back", at(place, turned))
            yield Variant(
                f"{place} is torch's transposed to {order} and read in that order",
                "transpose before reshaping",
                at(place, turned.reshape(theirs.shape)),
            )
        for axis in range(mine.ndim) if mine.shape == theirs.shape else ():
            yield Variant(f"{place} is turned round along axis {axis}", "turn it back", at(place, np.flip(mine, axis)))
            for step in (1, -1):
                yield Variant(
                    f"{place} is moved by {step} along axis {axis}", "move it back", at(place, np.roll(mine, step, axis))
                )


def batch_for_length(suspect: Suspect) -> Iterator[Variant]:
    """What is given to a layer with batch and length exchanged, as torch's layers want it unless they are told otherwise."""
    both = suspect.trial.expected, suspect.trial.actual
    given = [p for p in suspect.differing if p.child is not None and all(is_array(side.get(p)) for side in both)]
    for child in dict.fromkeys(place.child for place in given):
        places = [p for p in given if p.child == child and both[0][p].ndim > 1]
        what, change = f"what it gives {child} has its first two axes in the other order", "give it x.swapaxes(0, 1)"
        if runs_over_a_sequence(suspect, child):
            what = f"what it gives {child} has its first two axes, batch and length, in the other order"
            change += ", and swap what it returns: torch's layer has batch_first=False, Flax's has not"
        yield Variant(what, change, lambda chosen=places: {place: both[0][place].swapaxes(0, 1) for place in chosen})


SEQUENTIAL = ("MultiheadAttention", "LSTM", "GRU", "RNN", "Transformer")


def runs_over_a_sequence(suspect: Suspect, child: str | None) -> bool:
    """Whether a layer takes a batch and a length, the one of them first that it is told."""
    kinds = suspect.isolator.torch_layers[child or ""].kinds
    return any(kind.startswith("torch.nn.") and name in kind for kind in kinds for name in SEQUENTIAL)


def axes_of_arguments(suspect: Suspect) -> Iterator[Variant]:
    """Two axes of what the module is given taken for each other: batch and length, length and heads."""
    given = suspect.trial.torch.args
    ndims = {a.ndim for a in given if is_array(a) and a.dtype.kind == "f"}
    for first, second in itertools.combinations(range(min(ndims)), 2) if ndims and min(ndims) > 1 else ():

        def values(first: int = first, second: int = second) -> Values:
            found = suspect.again(args=tuple(swapped(a, first, second) for a in given))
            return {place: swapped(value, first, second) for place, value in found.items()}

        what = f"axes {first} and {second} of the arguments are taken for each other"
        yield Variant(what, "exchange them back where the module is called", values)
    yield from backwards(suspect)


def backwards(suspect: Suspect) -> Iterator[Variant]:
    """A module that runs over an axis of what it is given from the end, and returns what it makes so, or turned back."""
    given = suspect.trial.torch.args
    ndims = {a.ndim for a in given if is_array(a) and a.dtype.kind == "f"}
    # The last axis is the features', in which nothing runs.
    for axis, back in itertools.product(range(min(ndims) - 1 if ndims else 0), (False, True)):

        def values(axis: int = axis, back: bool = back) -> Values:
            found = suspect.again(args=tuple(flipped(a, axis) for a in given))
            return {place: flipped(value, axis) if back else value for place, value in found.items()}

        kept = ", and turns round what it returns" if back else ""
        yield Variant(
            f"Flax runs over axis {axis} of its arguments from the end{kept}", "run over it from the beginning", values
        )


def flipped(value: Any, axis: int) -> Any:
    return np.flip(value, axis) if is_array(value) and value.ndim > axis and value.dtype.kind == "f" else value


def swapped(value: Any, first: int, second: int) -> Any:
    return np.swapaxes(value, first, second) if is_array(value) and value.ndim > second and value.dtype.kind == "f" else value


def pairs_of_channels(suspect: Suspect) -> Iterator[Variant]:
    """Rotary embedding that pairs neighbouring channels where torch pairs the halves, or the other way round."""
    given = suspect.trial.torch.args
    places = [place for place in floats(suspect) if place.child is None]
    for width in {a.shape[-1] for a in given if is_array(a) and a.dtype.kind == "f" and a.ndim > 1}:
        fitting = [i for i, a in enumerate(given) if is_array(a) and a.dtype.kind == "f" and a.shape[-1:] == (width,)]
        groups = [[i] for i in fitting] + ([fitting[:2], fitting] if len(fitting) > 1 else [])
        for chosen, neighbours, back in itertools.product(
            groups if width % 2 == 0 and width > 2 else [], (True, False), (True, False)
        ):
            order = np.arange(width).reshape((-1, 2) if neighbours else (2, -1)).T.ravel()
            words = ("neighbouring channels", "the two halves") if neighbours else ("the two halves of channels", "neighbours")
            yield told_pairs(suspect, *words, reordered(suspect, places, chosen, order, back))


def told_pairs(suspect: Suspect, mine: str, theirs: str, values: Callable[[], Values]) -> Variant:
    """Channels paired otherwise: those of a rotation, where there are angles, else those of a gate and its value."""
    given = [a for a in suspect.trial.torch.args if is_array(a) and a.dtype.kind == "f"]
    if suspect.named("sin", "cos") or len(given) > 1 or any("freq" in leaf.name for leaf in suspect.unpaired_weights):
        what = f"the rotary embedding rotates {mine} where torch rotates {theirs}"
        return Variant(what, "pair the channels as torch does, or permute q and k", values)
    what = f"Flax pairs {mine} where torch pairs {theirs}"
    change = "cut the channels as torch does: x[..., :n] and x[..., n:], or x[..., 0::2] and x[..., 1::2]"
    return Variant(what, change, values, name="order of pieces")


def reordered(suspect: Suspect, places: list[Place], chosen: list[int], order: np.ndarray, back: bool) -> Callable[[], Values]:
    """The module on arguments with their channels in another order, its results in the old order if they have channels."""

    def values() -> Values:
        args = tuple(a[..., order] if i in chosen else a for i, a in enumerate(suspect.trial.torch.args))
        found = suspect.again(args=args)
        restored = np.argsort(order)
        return {p: found[p][..., restored] if back and found[p].shape[-1] == order.size else found[p] for p in places}

    return values


def at_all(found: Values) -> Callable[[], Values]:
    """The values at some places, nothing said of others."""
    return lambda: found


def at(place: Place, value: Any) -> Callable[[], Values]:
    """The value at one place, nothing said of others."""
    return lambda: {place: value}
