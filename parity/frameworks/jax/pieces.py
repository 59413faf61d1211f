"""A traced function run piece by piece, so that what it records is handed on while it runs.

One compiled program returns all of its results at its end, and holds them until then. Cut into several, each returns
what was recorded in it. Callbacks out of one program would do the same, but on a single core those of jax wait for
themselves (seen with jax 0.10 from arrays of 2 MiB on).
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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


def in_pieces(body: Callable[..., Any], given: Sequence[Any], keep: Callable[[np.ndarray], Any]) -> Any:
    """Run a function whose results are arrays, each handed on as soon as its piece is through.

    Args:
        body: any function that jax can trace.
        given: its arguments.
        keep: gets each result in NumPy, in jax's memory where it can be read there: what it keeps of it it copies. One that
            is returned several times it gets once.

    Returns:
        What `keep` made of them, in the tree that `body` returns.
    """
    traced, shapes = jax.make_jaxpr(body, return_shape=True)(*given)
    jaxpr = traced.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*traced.consts, *jax.tree.leaves(tuple(given))), strict=True))
    wanted = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    kept = {atom: keep(np.asarray(values[atom])) for atom in wanted if atom in values}
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
                kept[atom] = keep(np.asarray(result))
            if last.get(atom, -1) > number:
                values[atom] = result
    returned: list[Any] = list(jaxpr.outvars)
    outputs = [keep(literal(o)) if isinstance(o, Literal) else kept[o] for o in returned]
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def literal(atom: Any) -> np.ndarray:
    """A number that a program holds, as an array of the dtype that it has there."""
    return np.asarray(atom.val, atom.aval.dtype)


class Records:
    """What a function's body records, as arrays that a program can return and the names under which they are told.

    A body may be traced more than once; each time it begins anew, by `clear`.
    """

    def __init__(self) -> None:
        self.order: list[tuple[str, int, str | int, Any]] = []

    def clear(self) -> None:
        """Begin anew."""
        self.order.clear()

    def arrays(self, records: Iterable[tuple[str, int, Mapping[str | int, Any]]]) -> list[Any]:
        """The arrays of records by path, call and name, in order. Outputs are named by their path, inputs by position."""
        found: list[Any] = []
        for path, call, values in records:
            for name, value in values.items():
                self.order.append((path, call, name, None if is_array(value) else value))
                found.append(value if is_array(value) else None)
        return found

    def captured(self, arrays: Sequence[Any]) -> list[Captured]:
        """The records with what became of their arrays."""
        found: dict[tuple[str, int], Captured] = {}
        for (path, call, name, static), array in zip(self.order, arrays, strict=True):
            one = found.setdefault((path, call), Captured(path, call, {}))
            if isinstance(name, int):
                one.inputs[name] = array
            else:
                one.outputs[name] = static if array is None else array
        return list(found.values())


def held(leaf: Any, keep: Callable[[np.ndarray], Any]) -> Any:
    """What stands for a result of a function that ran by itself; what is no array is itself."""
    return keep(np.asarray(leaf)) if is_array(leaf) else leaf


def cut(equations: list[JaxprEqn], wanted: set[Any]) -> list[list[JaxprEqn]]:
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
