"""A Flax module's own code run equation by equation, on a tape."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as known

from parity.evidence.faults import SourceLine
from parity.evidence.tape import LIMIT, TURN, Step, Tape, TooLongError
from parity.frameworks.jax.running import QUICK, platform
from parity.frameworks.source_lines import innermost

# Compiled as one program as long as it is no longer than that, and what it computes fits in so many bytes.
COMPILED, BYTES = 300, 2**28
# Equations that hold a program and do nothing but run it, with the name under which they hold it.
HOLDERS = {
    known.jit_p.name: "jaxpr",
    known.remat_p.name: "jaxpr",
    known.closed_call_p.name: "call_jaxpr",
    known.call_p.name: "call_jaxpr",
    known.custom_jvp_call_p.name: "call_jaxpr",
    known.custom_vjp_call_p.name: "call_jaxpr",
}
LOOPS = (known.while_p.name, known.cond_p.name)
# They hand their operand on.
SILENT = ("stop_gradient", "copy", "copy_p", "sharding_constraint", "optimization_barrier", "pvary", "name")


class Where:
    """The user's line of an equation.

    Attributes:
        line: None if nobody's code asked for it.
        within: as of `Step`.
    """

    def __init__(self, line: SourceLine | None = None, within: str = ""):
        self.line, self.within = line, within


class Recorder:
    """Runs a traced function equation by equation, and puts every one on a tape.

    Attributes:
        tape: what ran.
    """

    def __init__(self) -> None:
        self.tape = Tape()

    def run(self, body: Callable[..., Any], given: Sequence[Any]) -> Any:
        """What `body(*given)` returns.

        Raises:
            TooLongError: it computes more operations than are put on a tape.
        """
        traced, shapes = jax.make_jaxpr(body, return_shape=True)(*given)
        leaves = jax.tree.leaves(tuple(given))
        needed = alive(traced.jaxpr)
        length = sum(len_of(eqn) for eqn in needed)
        if length > LIMIT:
            raise TooLongError(f"more than {LIMIT} operations")
        compiled = length <= COMPILED and not any(branches(eqn) for eqn in needed)
        if compiled and sum(bytes_of(eqn) for eqn in needed) <= BYTES:
            outputs = self.compiled(traced, needed, leaves)
        else:
            outputs = Interpreter(self.tape, numbers=True).run(traced.jaxpr, traced.consts, leaves, needed)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    def compiled(self, traced: ClosedJaxpr, needed: list[JaxprEqn], leaves: list[Any]) -> list[Any]:
        """As one program that returns all it computes: eagerly every operation would be compiled by itself."""
        shadow = Tape()
        interpreter = Interpreter(shadow, numbers=False)

        def body(consts: Any, leaves: Any) -> tuple[list[Any], list[Any]]:
            interpreter.arrays.clear()
            outputs = interpreter.run(traced.jaxpr, consts, leaves, needed)
            return outputs, interpreter.arrays

        outputs, arrays = jax.jit(body, compiler_options=QUICK.get(platform()))(list(traced.consts), leaves)
        for array, (source, constant) in zip(arrays, interpreter.sources, strict=True):
            self.tape.add(np.asarray(array), source, constant)
        self.tape.steps = shadow.steps
        return list(outputs)


class Interpreter:
    """Runs a program equation by equation.

    Args:
        tape: on which steps are put.
        numbers: whether arrays hold numbers, whose fingerprints go on the tape at once; else they are kept.
    """

    def __init__(self, tape: Tape, *, numbers: bool):
        self.tape, self.numbers = tape, numbers
        self.arrays: list[Any] = []
        self.sources: list[tuple[int | None, bool]] = []
        # What the turns of the scans that are running compute.
        self.seen: list[list[Any]] = []

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], leaves: Sequence[Any], needed: list[JaxprEqn]) -> list[Any]:
        """The outputs of a whole program."""
        given = [(a, self.put(a, None, np.ndim(a) == 0 and i < len(consts))) for i, a in enumerate((*consts, *leaves))]
        outputs = self.block(jaxpr, given, Where(), needed)
        return [array for array, _ in outputs]

    def put(self, array: Any, source: int | None, constant: bool) -> int:
        """A value on the tape, whose number it returns; a key of random numbers is given as what it holds."""
        if jnp.issubdtype(array.dtype if hasattr(array, "dtype") else np.asarray(array).dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        if self.numbers:
            return self.tape.add(np.asarray(array), source, constant)
        self.arrays.append(jnp.asarray(array))
        self.sources.append((source, constant))
        return len(self.sources) - 1

    def constant(self, number: int) -> bool:
        return self.tape.values[number].constant if self.numbers else self.sources[number][1]

    def block(
        self, jaxpr: Jaxpr, given: list[tuple[Any, int]], outer: Where, needed: Sequence[JaxprEqn] | None = None
    ) -> list[tuple[Any, int]]:
        """The outputs of one program inside, each with its number on the tape."""
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))

        def read(atom: Any) -> tuple[Any, int]:
            if isinstance(atom, Literal):
                return atom.val, self.put(np.asarray(atom.val), None, True)
            return values[atom]

        for eqn in jaxpr.eqns if needed is None else needed:
            made = self.equation(eqn, [read(atom) for atom in eqn.invars], where(eqn, outer))
            values.update(zip(eqn.outvars, made, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, given: list[tuple[Any, int]], at: Where) -> list[tuple[Any, int]]:
        name = eqn.primitive.name
        if name in HOLDERS:
            inner = eqn.params[HOLDERS[name]]
            jaxpr, consts = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
            if len(jaxpr.invars) == len(given):
                return self.block(jaxpr, [*self.closed(consts), *given], at)
        if name == known.scan_p.name:
            return self.scan(eqn, given, at)
        if name == known.while_p.name and self.numbers:
            return self.loop(eqn, given, at)
        if name == known.cond_p.name and self.numbers:
            index, *rest = given
            branch = eqn.params["branches"][int(np.clip(int(index[0]), 0, len(eqn.params["branches"]) - 1))]
            return self.block(branch.jaxpr, [*self.closed(branch.consts), *rest], at)
        return self.operation(eqn, given, at)

    def closed(self, consts: Sequence[Any]) -> list[tuple[Any, int]]:
        return [(array, self.put(array, None, False)) for array in consts]

    def operation(self, eqn: JaxprEqn, given: list[tuple[Any, int]], at: Where) -> list[tuple[Any, int]]:
        """One equation, as it is."""
        bound: Any = eqn.primitive.get_bind_params(eqn.params)
        # Functions apart from the rest, up to jax 0.9.
        functions, parameters = bound if isinstance(bound, tuple) else ((), bound)
        with eqn.ctx.manager:
            result = eqn.primitive.bind(*functions, *(array for array, _ in given), **parameters)
        made = list(result) if eqn.primitive.multiple_results else [result]
        numbers = [number for _, number in given]
        if eqn.primitive.name in SILENT and len(made) == len(given):
            return list(zip(made, numbers, strict=True))
        step = self.tape.begin()
        constant = all(self.constant(number) for number in numbers)
        outputs = [self.put(array, step, constant) for array in made]
        if self.seen:
            self.seen[-1] += [array for array in made if jnp.issubdtype(array.dtype, jnp.floating)]
        self.tape.steps.append(Step(eqn.primitive.name, at.within, at.line, tuple(numbers), tuple(outputs)))
        return list(zip(made, outputs, strict=True))

    def scan(self, eqn: JaxprEqn, given: list[tuple[Any, int]], at: Where) -> list[tuple[Any, int]]:
        """A scan, turn by turn; what it stacks is put on the tape as one value."""
        body, fixed, carried = eqn.params["jaxpr"], eqn.params["num_consts"], eqn.params["num_carry"]
        consts, carry, rows = given[:fixed], given[fixed : fixed + carried], given[fixed + carried :]
        turns = range(eqn.params["length"])
        kept: dict[int, list[tuple[Any, int]]] = {}
        made: dict[int, list[Any]] = {}
        for turn in reversed(turns) if eqn.params["reverse"] else turns:
            row = [self.taken((array[turn], number), at) for array, number in rows]
            self.seen.append([])
            results = self.block(body.jaxpr, [*self.closed(body.consts), *consts, *carry, *row], at)
            carry, kept[turn], made[turn] = results[:carried], results[carried:], self.seen.pop()
        if not turns:
            return self.operation(eqn, given, at)
        stacked = [self.stacked([kept[turn][i] for turn in turns], at) for i in range(len(eqn.outvars) - carried)]
        self.over_turns([made[turn] for turn in turns])
        return [*carry, *stacked]

    def over_turns(self, made: list[list[Any]]) -> None:
        """What all turns of a loop compute, each as one array: the other side may compute them at once."""
        if not self.tape.steps or len({len(one) for one in made}) != 1:
            return
        step = self.tape.steps.pop()
        outputs = [self.put(jnp.stack(arrays), len(self.tape.steps), False) for arrays in zip(*made, strict=True)]
        self.tape.steps.append(Step(step.name, step.within, step.line, step.inputs, (*step.outputs, *outputs)))

    def taken(self, value: tuple[Any, int], at: Where) -> tuple[Any, int]:
        array, number = value
        step = self.tape.begin()
        output = self.put(array, step, self.constant(number))
        self.tape.steps.append(Step(TURN, "", at.line, (number,), (output,)))
        return array, output

    def stacked(self, rows: list[tuple[Any, int]], at: Where) -> tuple[Any, int]:
        array = jnp.stack([row for row, _ in rows])
        step = self.tape.begin()
        output = self.put(array, step, False)
        self.tape.steps.append(Step("stack", "", at.line, tuple(number for _, number in rows), (output,)))
        return array, output

    def loop(self, eqn: JaxprEqn, given: list[tuple[Any, int]], at: Where) -> list[tuple[Any, int]]:
        """A loop of unknown length, turn by turn."""
        test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        outside, inside, state = given[:of_test], given[of_test : of_test + of_body], given[of_test + of_body :]
        while bool(self.block(test.jaxpr, [*self.closed(test.consts), *outside, *state], at)[0][0]):
            state = self.block(body.jaxpr, [*self.closed(body.consts), *inside, *state], at)
        return state


# ---------------------------------------------------------------- what an equation is


def where(eqn: JaxprEqn, outer: Where) -> Where:
    """The user's line of an equation: of a library's function that jax keeps traced, the line that calls it."""
    traceback = eqn.source_info.traceback
    frames: Iterator[Any] = iter(()) if traceback is None else iter(traceback.frames)
    line, within = innermost((f.file_name, f.function_name, f.line_num) for f in frames)
    if line is not None:
        return Where(line, within or (eqn.params.get("name", "") if eqn.primitive.name == known.jit_p.name else ""))
    return Where(outer.line, outer.within or within)


def alive(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations on which the outputs depend: what modules compute whose answers are known is left out."""
    wanted = {id(atom) for atom in jaxpr.outvars}
    found = []
    for eqn in reversed(jaxpr.eqns):
        if any(id(out) in wanted for out in eqn.outvars):
            found.append(eqn)
            wanted |= {id(atom) for atom in eqn.invars}
    return found[::-1]


def inside(eqn: JaxprEqn) -> Iterator[tuple[Jaxpr, int]]:
    """The programs in an equation, and how often each runs, as far as that is known."""
    for held in eqn.params.values():
        for one in held if isinstance(held, tuple | list) else [held]:
            jaxpr = one.jaxpr if isinstance(one, ClosedJaxpr) else one
            if isinstance(jaxpr, Jaxpr):
                yield jaxpr, eqn.params["length"] if eqn.primitive.name == known.scan_p.name else 1


def len_of(eqn: JaxprEqn) -> int:
    """How many operations an equation is."""
    return max(1, sum(times * sum(map(len_of, jaxpr.eqns)) for jaxpr, times in inside(eqn)))


def bytes_of(eqn: JaxprEqn) -> int:
    """How much memory the results of all that it computes take."""
    shapes: list[Any] = [out.aval for out in eqn.outvars if hasattr(out.aval, "size")]
    own = sum(shape.size * shape.dtype.itemsize for shape in shapes)
    return own + sum(times * sum(map(bytes_of, jaxpr.eqns)) for jaxpr, times in inside(eqn))


def branches(eqn: JaxprEqn) -> bool:
    """Whether what it runs depends on numbers."""
    return eqn.primitive.name in LOOPS or any(branches(one) for jaxpr, _ in inside(eqn) for one in jaxpr.eqns)
