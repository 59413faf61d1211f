"""A traced function run piece by piece, so that what it records is handed on while it runs.

One compiled program returns all of its results at its end, and holds them until then. Cut into several, each returns
what was recorded in it. Callbacks out of one program would do the same, but on a single core those of jax wait for
themselves (seen with jax 0.10 from arrays of 2 MiB on).
"""

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from parity.evidence.calls import Captured
from parity.frameworks.jax.arrays import is_array
from parity.frameworks.jax.recording import alive
from parity.frameworks.jax.running import QUICK, platform

# Bytes of results after which a program is cut: smaller ones stay whole.
PIECE = 16 * 2**20


def in_pieces(
    body: Callable[..., Any],
    given: Sequence[Any],
    keep: Callable[[np.ndarray], Any],
    take: Callable[[int, Any], bool] = lambda place, one: False,
) -> Any:
    """Run a function whose results are arrays, each handed on as soon as its piece is through.

    Args:
        body: any function that jax can trace.
        given: its arguments.
        keep: gets each result in NumPy, in jax's memory where it can be read there: what it keeps of it it copies. One that
            is returned several times it gets once.
        take: gets what `keep` made of a result, with its place among the leaves that `body` returns, and says whether it
            takes it: then nothing is held of it here, and None stands in its place.

    Returns:
        What `keep` made of them, in the tree that `body` returns.
    """
    traced, shapes = jax.make_jaxpr(body, return_shape=True)(*given)
    jaxpr = traced.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*traced.consts, *jax.tree.leaves(tuple(given))), strict=True))
    wanted: dict[Any, list[int]] = {}
    outputs: list[Any] = [None] * len(jaxpr.outvars)

    def arrived(array: Any, places: list[int]) -> None:
        one = keep(np.asarray(array))
        for place in places:
            outputs[place] = None if take(place, one) else one

    for place, atom in enumerate(jaxpr.outvars):
        if isinstance(atom, Literal):
            arrived(literal(atom), [place])
        else:
            wanted.setdefault(atom, []).append(place)
    for atom, places in wanted.items():
        if atom in values:
            arrived(values[atom], places)
    # What has effects may write where nobody sees it from here.
    pieces = [list(jaxpr.eqns)] if jaxpr.effects else cut(alive(jaxpr), wanted)
    last = {atom: number for number, piece in enumerate(pieces) for eqn in piece for atom in operands(eqn)}
    programs: dict[Hashable, Any] = {}
    for number, piece in enumerate(pieces):
        made = [out for eqn in piece for out in eqn.outvars if out in wanted or last.get(out, -1) > number]
        results = run_piece(jaxpr, piece, made, values, programs)
        values = {atom: value for atom, value in values.items() if last.get(atom, -1) > number}
        for atom in made:
            result = results.pop(0)
            if atom in wanted:
                arrived(result, wanted[atom])
            if last.get(atom, -1) > number:
                values[atom] = result
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def literal(atom: Any) -> np.ndarray:
    """A number that a program holds, as an array of the dtype that it has there."""
    return np.asarray(atom.val, atom.aval.dtype)


class Records:
    """What a function's body records, as arrays that a program can return and the names under which they are told.

    A body may be traced more than once; each time it begins anew, by `clear`.

    Args:
        each: gets every record as soon as its last array is there; what it returns stands in its place.
    """

    def __init__(self, each: Callable[[Captured], Captured] | None = None) -> None:
        self.each = each or (lambda record: record)
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.found: dict[tuple[str, int], Captured] = {}
        self.places: list[tuple[tuple[str, int], str | int]] = []
        self.missing: Counter[tuple[str, int]] = Counter()

    def arrays(self, records: Iterable[tuple[str, int, Mapping[str | int, Any]]]) -> list[Any]:
        """The arrays of records by path, call and name, in order. Outputs are named by their path, inputs by position."""
        found: list[Any] = []
        for path, call, values in records:
            key = path, call
            self.found.setdefault(key, Captured(path, call, {}))
            for name, value in values.items():
                # Holds its place among the outputs.
                self.put(key, name, None if is_array(value) else value)
                if is_array(value):
                    self.places.append((key, name))
                    self.missing[key] += 1
                    found.append(value)
        return found

    def put(self, key: tuple[str, int], name: str | int, value: Any) -> None:
        record = self.found[key]
        if isinstance(name, int):
            record.inputs[name] = value
        else:
            record.outputs[name] = value

    def take(self, place: int, one: Any) -> bool:
        """Put what became of one of `arrays` on its record; False if there are not as many."""
        if place >= len(self.places):
            return False
        key, name = self.places[place]
        self.put(key, name, one)
        self.missing[key] -= 1
        if not self.missing[key]:
            self.found[key] = self.each(self.found[key])
        return True

    @property
    def captured(self) -> list[Captured]:
        """The records, in the order in which they were made."""
        return list(self.found.values())


def held(leaf: Any, keep: Callable[[np.ndarray], Any]) -> Any:
    """What stands for a result of a function that ran by itself; what is no array is itself."""
    return keep(np.asarray(leaf)) if is_array(leaf) else leaf


def cut(equations: list[JaxprEqn], wanted: Container[Any]) -> list[list[JaxprEqn]]:
    """The same in pieces, of which none but the last returns less than `PIECE` bytes of results."""
    pieces, size = [list[JaxprEqn]()], 0
    for eqn in equations:
        if size >= PIECE:
            pieces.append([])
            size = 0
        pieces[-1].append(eqn)
        size += sum(bytes_of(out) for out in eqn.outvars if out in wanted)
    return pieces


def bytes_of(out: Any) -> int:
    return int(out.aval.size * out.aval.dtype.itemsize)


def operands(eqn: JaxprEqn) -> list[Any]:
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


def run_piece(
    jaxpr: Jaxpr, piece: list[JaxprEqn], made: list[Any], values: dict[Any, Any], programs: dict[Hashable, Any]
) -> list[Any]:
    """The values of `made`, as one compiled program; layers of one form share it, by `programs`."""
    inputs = list(dict.fromkeys(atom for eqn in piece for atom in operands(eqn) if atom in values))
    form = form_of(piece, inputs, made)
    compiled = programs.get(form)
    if compiled is None:
        program = ClosedJaxpr(Jaxpr((), inputs, made, piece, jaxpr.effects, jaxpr.debug_info), ())
        compiled = jax.jit(jaxpr_as_fun(program), compiler_options=QUICK.get(platform()))
        programs[form] = compiled
    return list(compiled(*(values[atom] for atom in inputs)))


def form_of(piece: list[JaxprEqn], inputs: list[Any], made: list[Any]) -> Hashable:
    """What two pieces share that are one program on other values; an object of its own if that cannot be told.

    Programs inside, as of a function that is compiled by itself, count as one only where they are one object.
    """
    numbers = {atom: number for number, atom in enumerate(inputs)}
    lines: list[Any] = [tuple(atom.aval for atom in inputs)]
    for eqn in piece:
        given = tuple(
            (atom.aval, literal(atom).tobytes()) if isinstance(atom, Literal) else numbers[atom] for atom in eqn.invars
        )
        numbers |= {out: len(numbers) + place for place, out in enumerate(eqn.outvars)}
        lines.append((eqn.primitive, given, *eqn.params.items(), tuple(out.aval for out in eqn.outvars), eqn.ctx))
    lines.append(tuple(numbers[atom] for atom in made))
    form = tuple(lines)
    try:
        hash(form)
    except TypeError:
        return object()
    return form
