"""Faults that nobody thought of: the Flax models' own code and layers, mutated one place at a time.

Every expression of every module's `__call__` that can be mutated is a candidate, and so is every layer; of those that
run and change what the model returns a few are drawn for each pair, the same with the same seed.
"""

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

# What the kind of each begins with.
MUTATED = "mutated"
# How many are drawn for each pair.
DRAWN = 3
# A mutant that moves no output by more, in units of the largest, computes the same in another way.
MOVED = 1e-5
# Functions whose whole numbers are axes.
ALONG = ("softmax", "log_softmax", "mean", "sum", "std", "var", "max", "concatenate", "split", "cumsum", "flip", "swapaxes")


@dataclass(frozen=True)
class Mutant:
    """One mutation of one module.

    Attributes:
        place: dotted path of the module.
        kind: what is mutated, and into what.
        plant: mutates the module of a model in place, and returns what undoes it.
    """

    place: str
    kind: str
    plant: Callable[[nnx.Module], Callable[[], None]]


def drawn(model: nnx.Module, args: tuple[Any, ...], known: set[str], seed: int) -> list[Mutant]:
    """A few mutants of a model, each of another sort as long as there are some.

    Args:
        model: as it came from the transfer; it is put back.
        args: on which a mutant must show.
        known: paths of the torch modules, of which one must be named.
        seed: of the draw.
    """
    rng, right = np.random.default_rng(seed), outputs(model, args)
    every = [one for one in candidates(model) if one.place in known]
    chosen: list[Mutant] = []
    for number in rng.permutation(len(every)):
        one = every[number]
        if len(chosen) < DRAWN and sort(one) not in map(sort, chosen) and shows(model, one, args, right):
            chosen.append(one)
    return chosen


def sort(one: Mutant) -> str:
    """What is mutated, without the place in the code."""
    return one.kind.partition(":")[0]


def shows(model: nnx.Module, one: Mutant, args: tuple[Any, ...], right: list[np.ndarray]) -> bool:
    """Whether a mutant runs, returns arrays of the same shapes, and other numbers."""
    undo = one.plant(module_at(model, one.place))
    try:
        found = outputs(model, args)
    except Exception:
        return False
    finally:
        undo()
    if [a.shape for a in found] != [a.shape for a in right]:
        return False
    with np.errstate(invalid="ignore"):
        return any(float(np.abs(a - b).max()) > MOVED * float(np.abs(b).max()) for a, b in zip(found, right, strict=True))


def outputs(model: nnx.Module, args: tuple[Any, ...]) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(model(*args))]


def candidates(model: nnx.Module) -> Iterator[Mutant]:
    """Every mutation of every module, in the order in which the model lists them."""
    for path, module in nnx.iter_modules(model):
        place = ".".join(map(str, path))
        if type(module).__module__.startswith("flax."):
            yield from of_layer(place, module)
        else:
            yield from of_code(place, module)


def module_at(model: nnx.Module, place: str) -> nnx.Module:
    return next(module for path, module in nnx.iter_modules(model) if ".".join(map(str, path)) == place)


# ---------------------------------------------------------------- layers


def of_layer(place: str, layer: nnx.Module) -> Iterator[Mutant]:
    """A layer of Flax's with one of its arrays or settings mutated."""
    if getattr(layer, "bias", None) is not None:
        yield Mutant(place, "mutated bias missing: the layer's", attribute("bias", lambda _: None))
    if hasattr(layer, "epsilon"):
        yield Mutant(place, "mutated epsilon: a hundred times the layer's", attribute("epsilon", lambda x: 100 * x))
    kernel = getattr(layer, "kernel", None)
    if kernel is not None and kernel.ndim == 2 and kernel.shape[0] == kernel.shape[1]:
        yield Mutant(place, "mutated kernel: the layer's, transposed", array("kernel", lambda x: x.T))
    if kernel is not None and kernel.ndim > 2:
        yield Mutant(place, "mutated kernel: the layer's, turned round", array("kernel", lambda x: jnp.flip(x, 0)))
    if getattr(layer, "scale", None) is not None:
        yield Mutant(place, "mutated scale left at one: the layer's", array("scale", jnp.ones_like))


def attribute(name: str, change: Callable[[Any], Any]) -> Callable[[nnx.Module], Callable[[], None]]:
    """Plants another value of an attribute."""

    def plant(layer: nnx.Module) -> Callable[[], None]:
        before = getattr(layer, name)
        setattr(layer, name, change(before))
        return lambda: setattr(layer, name, before)

    return plant


def array(name: str, change: Callable[[jax.Array], jax.Array]) -> Callable[[nnx.Module], Callable[[], None]]:
    """Plants other numbers in an array."""

    def plant(layer: nnx.Module) -> Callable[[], None]:
        variable = getattr(layer, name)
        before = variable[...]
        variable[...] = change(before)

        def undo() -> None:
            variable[...] = before

        return undo

    return plant


# ---------------------------------------------------------------- code


def of_code(place: str, module: nnx.Module) -> Iterator[Mutant]:
    """A module with one expression of its own `__call__` mutated."""
    tree = parsed(type(module))
    for number, node in enumerate(ast.walk(tree)) if tree else ():
        for which, (kind, new) in enumerate(mutations(node)):
            text = f"mutated {kind}: {ast.unparse(node)} to {ast.unparse(new)}"
            yield Mutant(place, text, rewritten(number, which))


def parsed(kind: type[nnx.Module]) -> ast.Module | None:
    """The code of a module's `__call__`, without types; None if it is not its own or hangs on its surroundings."""
    call = kind.__dict__.get("__call__")
    if call is None or not inspect.isfunction(call) or call.__closure__ or hasattr(call, "__wrapped__"):
        return None
    lines, first = inspect.getsourcelines(call)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    function.returns = None
    for one in ast.walk(function.args):
        if isinstance(one, ast.arg):
            one.annotation = None
    return ast.increment_lineno(tree, first - 1)


def rewritten(number: int, which: int) -> Callable[[nnx.Module], Callable[[], None]]:
    """Plants one mutation of one expression: the instance alone gets a class of its own, of the same name."""

    def plant(module: nnx.Module) -> Callable[[], None]:
        kind = type(module)
        tree = parsed(kind)
        assert tree is not None
        old = list(ast.walk(tree))[number]
        _, new = list(mutations(old))[which]
        changed = ast.fix_missing_locations(Replaced(old, new).visit(tree))
        space: dict[str, Any] = {}
        call = kind.__dict__["__call__"]
        exec(compile(changed, inspect.getfile(kind), "exec"), call.__globals__, space)
        module.__class__ = type(kind.__name__, (kind,), {"__call__": space["__call__"], "__module__": kind.__module__})

        def undo() -> None:
            module.__class__ = kind

        return undo

    return plant


class Replaced(ast.NodeTransformer):
    """A tree with one expression in place of another."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        """The new expression where the old one stood."""
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def mutations(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in place of an expression, each with its name."""
    if isinstance(node, ast.BinOp):
        yield from of_arithmetic(node)
    if isinstance(node, ast.Call):
        yield from of_call(node)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        yield from of_position(node)


def of_arithmetic(node: ast.BinOp) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node.op, ast.Add):
        yield "term left out", node.left
        yield "term left out", node.right
        yield "minus for plus", ast.BinOp(node.left, ast.Sub(), node.right)
    if isinstance(node.op, ast.Div):
        yield "product for quotient", ast.BinOp(node.left, ast.Mult(), node.right)
    if isinstance(node.op, ast.Mult):
        yield "factor left out", node.left
        yield "factor left out", node.right


def of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    own = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == "self"
    if own and len(node.args) == 1 and not isinstance(node.args[0], ast.Starred):
        yield "module left out", node.args[0]
    if len(node.args) > 1 and all(isinstance(arg, ast.Name) for arg in node.args[:2]):
        first, second, *rest = node.args
        yield "exchange of arguments", ast.Call(node.func, [second, first, *rest], node.keywords)
    if name in ALONG:
        for place, arg in enumerate(node.args):
            axis = number_of(arg)
            if axis is not None:
                args = [*node.args[:place], ast.Constant(axis - 1), *node.args[place + 1 :]]
                yield "axis", ast.Call(node.func, args, node.keywords)


def of_position(node: ast.Subscript) -> Iterator[tuple[str, ast.AST]]:
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
    if parts and number_of(parts[-1]) is not None:
        other = ast.Constant(0 if number_of(parts[-1]) else 1)
        yield "position", ast.Subscript(node.value, ast.Tuple([*parts[:-1], other], ast.Load()), node.ctx)


def number_of(node: ast.AST) -> int | None:
    """The whole number that stands there, None if it is none."""
    try:
        value = ast.literal_eval(copy.deepcopy(node))
    except ValueError:
        return None
    return value if type(value) is int else None
