"""Inputs that can see faults, from shapes or from an example."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain, count
from typing import Any

import numpy as np

from parity.errors import InputError, listed
from parity.evidence.calls import Call
from parity.evidence.ids import vocabularies
from parity.evidence.input_sets import InputSet
from parity.evidence.numerics import UNIT, numpy_float
from parity.evidence.subject import argument_problems, mask_paths
from parity.evidence.trees import mapped
from parity.frameworks import load

Size = int | str

# What a mask says, and the value that hides and the one that shows.
MASKS: dict[str, tuple[float, float]] = {
    "true hides": (True, False),
    "true shows": (False, True),
    "added": (-np.inf, 0.0),
    "one hides": (1.0, 0.0),
    "one shows": (0.0, 1.0),
}
# Sizes for named holes, in this order: small, and no two the same.
SIZES = (3, 5, 7, 4, 6, 9, 11, 8, 10, 13)
OTHER_SIZES = (2, 12, 9, 14, 6, 15, 17, 16, 18, 19)
SQUARE_SIZES = (4, 6, 5, 3, 7, 8, 2)
# Where shifted rows lie, and by how much their values differ.
SHIFT, SPREAD = 10.0, 0.05


@dataclass(frozen=True)
class Values:
    """Floating point numbers.

    Attributes:
        shape: sizes, or names of sizes that are left open, such as `("batch", "length", 8)`.
        dtype: None takes that of the model, or float32.
        low: the smallest value, for a model that takes no others; None has both signs.
    """

    shape: tuple[Size, ...]
    dtype: str | None = None
    low: float | None = None


@dataclass(frozen=True)
class Ids:
    """Whole numbers that name rows of a table.

    Attributes:
        shape: as of `Values`.
        vocabulary: they go from 0 to one less; None takes it from the table of the model that looks them up.
        dtype: of the array.
    """

    shape: tuple[Size, ...]
    vocabulary: int | None = None
    dtype: str = "int32"


@dataclass(frozen=True)
class Mask:
    """What is hidden, along the last axis.

    Attributes:
        shape: as of `Values`.
        says: `true hides` or `true shows` (bool), `added` (0 or minus infinity), `one hides` or `one shows` (0 and 1).
        dtype: None takes bool for the first two, float32 for the others.
    """

    shape: tuple[Size, ...]
    says: str
    dtype: str | None = None


Spec = Values | Ids | Mask


@dataclass(frozen=True)
class Plan:
    """What makes one input set."""

    name: str
    shows: str
    style: str
    sizes: Mapping[str, int]
    pattern: str = "random"


class Place:
    """Where an array of a spec goes in the arguments. No dataclass: that would be taken for a container."""

    def __init__(self, spec: Spec):
        self.spec = spec


def probe_inputs(
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    model: Any = None,
    sizes: Mapping[str, int | Iterable[int]] | None = None,
    masks: str | Mapping[str, str] | None = None,
    hidden_rows: bool = False,
    seed: int = 0,
) -> list[InputSet]:
    """Make inputs on which the faults of a port show, for `parity.compare`.

    Each set has a batch and a length above one, values of both signs, ids that reach both ends of
    their range, and masks that hide something in every row and never a whole one. The sets
    differ in scale, offset, padding and, where the shape leaves them open, in sizes.

    Args:
        args: one for each positional argument: a shape such as `("batch", "length", 8)`, a
            `Values`, `Ids` or `Mask`, an example array of NumPy, torch or jax, or tuples, lists and
            dicts of them. Anything else is passed on as it is. Of an example only shape, dtype and
            range count: floats get both signs unless none is negative, whole numbers stay between
            its smallest and largest unless a model tells how many there may be.
        kwargs: keyword arguments likewise.
        model: the torch model, for its dtype, the tables that ids are looked up in, and the
            arguments that its `forward` calls a mask.
        sizes: for a name of a size the number, or those to choose from.
        masks: what masks among the examples say, one of `true hides`, `true shows`, `added`,
            `one hides`, `one shows`; a mapping gives each its own, by path such as `args[1]`.
        hidden_rows: add a set in which some rows are hidden whole: there conventions differ.
        seed: of all numbers.

    Returns:
        Named sets, each with what it can show. The arrays are NumPy's.

    Raises:
        InputError: an argument cannot be made; all reasons at once.
    """
    problems = argument_problems(kwargs if kwargs is not None else {}, seed)
    if problems:
        raise InputError(listed("cannot make inputs", problems))
    stated = stated_masks(args, kwargs or {}, model, masks, problems)
    maker = Specs(stated, sizes or {}, problems)
    tree = maker.places(tuple(args), "args"), maker.places(dict(kwargs or {}), "kwargs")
    maker.check()
    if problems:
        raise InputError(listed("cannot make inputs", problems))
    room = load("torch") if model is not None else None
    dtype = (room.model_dtype(model) if room else None) or "float32"
    plans = list(planned(maker, hidden_rows))
    ranges = known_ranges(maker, tree, room, model, plans[0], dtype, seed)
    return [made(plan, tree, ranges, dtype, seed) for plan in plans]


def stated_masks(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], model: Any, masks: Any, problems: list[str]
) -> dict[str, str]:
    """What is said of masks, by path; '' is said of all."""
    stated = dict(masks) if isinstance(masks, Mapping) else {"": masks} if masks is not None else {}
    problems += [
        f"masks must be one of {', '.join(map(repr, MASKS))}, got {said!r}{f' for {path}' if path else ''}"
        for path, said in stated.items()
        if said not in MASKS
    ]
    if "" in stated and model is not None:
        stated |= {path: stated[""] for path in mask_paths(model, args, kwargs) if path not in stated}
    return stated


class Specs:
    """Arguments as they are given, turned into specs.

    Attributes:
        found: every spec, by path.
    """

    def __init__(self, masks: Mapping[str, str], sizes: Mapping[str, Any], problems: list[str]):
        self.masks, self.given, self.problems = masks, sizes, problems
        self.found: dict[str, Spec] = {}
        self.ranges: dict[str, tuple[int, int]] = {}

    def places(self, value: Any, path: str) -> Any:
        """The value with a `Place` for every array."""
        if isinstance(value, Values | Ids | Mask):
            return self.place(value, path)
        if is_shape(value) and path not in ("args", "kwargs"):
            return self.place(Values(tuple(value)), path)
        array = example(value)
        if array is not None:
            return self.placed_example(array, value, path)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.places(getattr(value, name), f"{path}.{name}") for name in value._fields))
        if isinstance(value, tuple | list):
            return type(value)(self.places(part, f"{path}[{number}]") for number, part in enumerate(value))
        if isinstance(value, Mapping):
            return {key: self.places(part, f"{path}[{key!r}]") for key, part in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            names = [f.name for f in fields(value) if f.init]
            return replace(value, **{name: self.places(getattr(value, name), f"{path}.{name}") for name in names})
        return value

    def place(self, spec: Spec, path: str) -> Place:
        wrong = [size for size in spec.shape if not isinstance(size, str) and not (is_size(size) and size >= 1)]
        if wrong:
            self.problems.append(f"{path} has sizes {', '.join(map(repr, wrong))}; a size is a whole number from 1, or a name")
        if isinstance(spec, Mask) and spec.says not in MASKS:
            self.problems.append(f"{path}: a mask says one of {', '.join(map(repr, MASKS))}, got {spec.says!r}")
        known = spec.vocabulary if isinstance(spec, Ids) else None
        if known is not None and not (is_size(known) and known >= 2):
            self.problems.append(f"{path}: a vocabulary must have at least 2 ids, got {known!r}")
        if isinstance(spec, Values) and spec.dtype is not None and spec.dtype not in UNIT:
            self.problems.append(f"{path}: values are {', '.join(UNIT)}, got {spec.dtype!r}")
        self.found[path] = spec
        return Place(spec)

    def placed_example(self, array: np.ndarray, value: Any, path: str) -> Any:
        """The spec of an example; an array without axes stays as it is: it may be a setting."""
        said = self.masks.get(path) or (self.masks.get("") if array.dtype == bool else None)
        if not array.ndim:
            return value
        if said:
            return self.place(Mask(array.shape, said, str(array.dtype)), path)
        if array.dtype == bool:
            self.problems.append(f"{path} is a mask; state what it says: masks='true hides' or masks='true shows'")
            return value
        if array.dtype.kind in "iu":
            if array.size:
                self.ranges[path] = int(array.min()), int(array.max())
            return self.place(Ids(array.shape, None, str(array.dtype)), path)
        if str(array.dtype) not in UNIT:
            self.problems.append(f"{path} is {array.dtype}, of which no inputs are made; give a parity.Values")
            return value
        low = 0.0 if array.size and float(array.astype(np.float64).min()) >= 0 else None
        return self.place(Values(array.shape, str(array.dtype), low), path)

    @property
    def names(self) -> list[str]:
        """Names of open sizes, in their order."""
        return list(dict.fromkeys(size for spec in self.found.values() for size in spec.shape if isinstance(size, str)))

    @property
    def numbers(self) -> set[int]:
        """Sizes that are stated."""
        return {size for spec in self.found.values() for size in spec.shape if not isinstance(size, str)}

    def choices(self, name: str, usual: Iterable[int]) -> list[int]:
        """Sizes that a name may have, the preferred first."""
        allowed = self.given.get(name)
        if allowed is None:
            return list(usual)
        allowed = [allowed] if is_size(allowed) else list(allowed)
        return [size for size in usual if size in allowed] + [size for size in allowed if size not in tuple(usual)]

    def check(self) -> None:
        """What is wrong with the sizes."""
        unknown = [name for name in self.given if name not in self.names]
        if unknown:
            known = ", ".join(self.names) or "none"
            self.problems.append(f"sizes names {', '.join(map(repr, unknown))}; the open sizes are: {known}")
        for name, allowed in self.given.items():
            sizes = [allowed] if is_size(allowed) else list(allowed) if isinstance(allowed, Iterable) else []
            if not sizes or not all(is_size(size) and size >= 1 for size in sizes):
                self.problems.append(
                    f"sizes[{name!r}] must be a whole number from 1, or several to choose from, got {allowed!r}"
                )
        if not self.found and not self.problems:
            self.problems.append("no argument is an array or a shape; give at least one, such as ('batch', 'length', 8)")


def is_size(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_shape(value: Any) -> bool:
    """Whether a tuple is the shape of an argument: whole numbers and names."""
    plain = isinstance(value, tuple) and not hasattr(value, "_fields") and bool(value)
    return plain and all(isinstance(size, str) or is_size(size) for size in value)


def example(value: Any) -> np.ndarray | None:
    """An array of any framework that is loaded, as NumPy; None for anything else, random keys among it."""
    if isinstance(value, np.ndarray):
        return value
    for room, package in (("torch", "torch"), ("nnx", "jax")):
        if package in sys.modules and load(room).is_array(value) and not str(value.dtype).startswith("key<"):
            return np.asarray(load(room).to_numpy(value))
    return None


# ------------------------------------------------------------------------------ plans


def planned(specs: Specs, hidden_rows: bool) -> Iterator[Plan]:
    """The sets that are worth making. Most share their sizes, so that a compiled program serves all of them."""
    usual = chosen_sizes(specs, SIZES)
    valued = any(isinstance(spec, Values) and spec.shape for spec in specs.found.values())
    masked = any(isinstance(spec, Mask) for spec in specs.found.values())
    yield Plan("plain", "wrong scales, orders, axes, ids and masks", "plain", usual)
    if valued:
        yield Plan("scales", "epsilon, activations, saturation: rows from 0.01 to 100", "scales", usual)
        yield Plan("shifted", "fast variance and lost digits: rows near 10 and -10 that hardly vary", "shifted", usual)
        yield Plan("low variance", "epsilon and where it stands: rows that vary by 0.001", "low variance", usual)
    if masked:
        yield Plan("padding", "masks at the end of each entry, of different lengths", "plain", usual, "padding")
    if specs.names:
        other = chosen_sizes(specs, OTHER_SIZES)
        if other != usual:
            yield Plan("other sizes", "sizes that were built in", "plain", other)
        square = square_sizes(specs)
        if square and square not in (usual, other):
            yield Plan("square", "swapped axes that keep their shape", "plain", square)
    if hidden_rows and masked:
        yield Plan("hidden rows", "what becomes of rows that are hidden whole", "plain", usual, "hidden rows")


def chosen_sizes(specs: Specs, usual: tuple[int, ...]) -> dict[str, int]:
    """A size for every name, each other than all the others and than those that are stated, as far as there are any."""
    taken, found = set(specs.numbers), {}
    for name in specs.names:
        options = specs.choices(name, usual) if name in specs.given else chain(usual, count(20))
        # Where only one size is allowed, it is taken, another name may have it or not.
        found[name] = next((size for size in options if size not in taken), None) or specs.choices(name, usual)[0]
        taken.add(found[name])
    return found


def square_sizes(specs: Specs) -> dict[str, int] | None:
    """The same size for all names that may have it; None if there are not two."""
    free = [name for name in specs.names if not is_size(specs.given.get(name))]
    for size in SQUARE_SIZES:
        if len(free) > 1 and all(size in specs.choices(name, SQUARE_SIZES) for name in free):
            return {name: size if name in free else specs.choices(name, ())[0] for name in specs.names}
    return None


# ------------------------------------------------------------------------------ numbers


def known_ranges(
    specs: Specs, tree: tuple[Any, Any], room: Any, model: Any, plan: Plan, dtype: str, seed: int
) -> dict[str, tuple[int, int]]:
    """The smallest and the largest id of each argument that holds ids.

    Raises:
        InputError: nobody says how many there are.
    """
    ids = {path: spec for path, spec in specs.found.items() if isinstance(spec, Ids)}
    ranges = {path: (0, spec.vocabulary - 1) for path, spec in ids.items() if spec.vocabulary is not None}
    open_paths = [path for path in ids if path not in ranges]
    if open_paths and room is None:
        unknown = [path for path in open_paths if path not in specs.ranges]
        if unknown:
            told = [
                f"nothing says how many ids {path} may hold; state a vocabulary, or give the torch model" for path in unknown
            ]
            raise InputError(listed("cannot make inputs", told))
    elif open_paths:
        first = made(plan, tree, ranges | dict.fromkeys(open_paths, (0, 0)), dtype, seed)
        floats = frozenset(path for path, spec in specs.found.items() if isinstance(spec, Values))
        call = Call(first.args, first.kwargs, floats)
        ranges |= {path: (0, rows - 1) for path, rows in vocabularies(room, model, call, open_paths).items()}
    return {path: specs.ranges[path] for path in open_paths if path in specs.ranges} | ranges


def made(plan: Plan, tree: tuple[Any, Any], ranges: Mapping[str, tuple[int, int]], dtype: str, seed: int) -> InputSet:
    """One set by its plan."""

    def array(path: str, value: Any) -> Any:
        if not isinstance(value, Place):
            return value
        spec = value.spec
        shape = tuple(plan.sizes[size] if isinstance(size, str) else int(size) for size in spec.shape)
        rng = np.random.default_rng([seed, 7, *(plan.name + path).encode()])
        if isinstance(spec, Ids):
            return drawn_ids(shape, *ranges[path], rng).astype(spec.dtype)
        if isinstance(spec, Mask):
            hidden, shows = MASKS[spec.says]
            usual = "bool" if spec.says.startswith("true") else "float32"
            return np.where(hidden_places(shape, plan.pattern, rng), hidden, shows).astype(numpy_float(spec.dtype or usual))
        return drawn_values(shape, plan.style, numpy_float(spec.dtype or dtype), spec.low, rng)

    args, kwargs = (mapped(array, part, name) for part, name in zip(tree, ("args", "kwargs"), strict=True))
    sizes = ", ".join(f"{name} {size}" for name, size in plan.sizes.items())
    return InputSet(plan.name, plan.shows + (f" ({sizes})" if sizes else ""), args, kwargs)


def drawn_values(
    shape: tuple[int, ...], style: str, dtype: np.dtype, low: float | None, rng: np.random.Generator
) -> np.ndarray:
    """Random values in one of the styles; a row lies along the last axis."""
    values = rng.standard_normal(shape)
    rows = (*shape[:-1], 1) if shape else ()
    if style == "scales":
        values *= 10.0 ** rng.uniform(-2, 2, rows)
    elif style == "shifted":
        # Half precision has few digits near the offset: there values must differ by more.
        spread = max(SPREAD, 16 * UNIT[dtype.name] * SHIFT)
        values = SHIFT * rng.choice((-1, 1), rows) * (1 + 0.1 * rng.standard_normal(rows)) + spread * values
    elif style == "low variance":
        values *= 1e-3
    if low is not None:
        values = low + np.abs(values)
    return np.asarray(values.astype(dtype))


def drawn_ids(shape: tuple[int, ...], low: int, high: int, rng: np.random.Generator) -> np.ndarray:
    """Random ids, both ends of the range and one that comes twice among them."""
    ids = rng.integers(low, high, shape, endpoint=True)
    flat = ids.reshape(-1)
    wanted = [low, high, *flat[:1]][: flat.size]
    flat[rng.permutation(flat.size)[: len(wanted)]] = wanted
    return ids


def hidden_places(shape: tuple[int, ...], pattern: str, rng: np.random.Generator) -> np.ndarray:
    """Where a mask hides. The first place of a row stays, so that several masks together hide no row whole."""
    length = shape[-1] if shape else 1
    places = np.arange(length)
    if length == 1:
        hidden = np.zeros(shape, bool)
    elif pattern == "padding":
        # From the whole length down, so that entries differ and one has no padding.
        entries = shape[0] if len(shape) > 1 else 1
        kept = length - np.arange(entries) % length if entries > 1 else np.array([max(1, length - 1)])
        front = (entries, *(1,) * (len(shape) - 2)) if len(shape) > 1 else ()
        hidden = np.broadcast_to(places >= kept.reshape((*front, 1)), shape).copy()
    else:
        hidden = rng.random(shape) < 0.5
        one = rng.integers(1, length, shape[:-1])
        hidden |= places == one[..., None]
        hidden &= places != 0
    if pattern == "hidden rows":
        rows = hidden.reshape(-1, length)
        rows[:: max(2, len(rows) // 2)] = True
    return hidden
