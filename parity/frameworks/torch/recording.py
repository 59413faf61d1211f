"""A dispatch mode that puts every operation of a torch module's own code on a tape."""

import sys
import weakref
from typing import Any

from torch import Tensor

from parity.evidence.fingerprints import fingerprint, same
from parity.evidence.tape import Step, Tape
from parity.frameworks.source_lines import innermost, of_python
from parity.frameworks.torch.leaves import to_numpy
from parity.frameworks.torch.modes import Mode

# They make tensors of nothing but numbers, or hand one on; what they are given tells nothing of their result.
SILENT: tuple[str, ...] = (
    "detach",
    "lift_fresh",
    "alias",
    "_local_scalar_dense",
    "is_same_size",
    "empty",
    "empty_like",
    "empty_strided",
)
SILENT += ("new_empty", "new_empty_strided")


class Recorder(Mode):
    """Put operations on a tape, with a fingerprint in place of every tensor.

    Attributes:
        tape: what ran.
        paused: above 0 inside a module that answers as it is told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()
        self.paused = 0
        # By place: the tensor last seen there, how often it had been written into, and the value.
        self.known: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], int, int]] = {}
        self.writers: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        silent = name in SILENT
        inputs = tensors((args, kwargs)) if not silent or "empty" not in name else []
        taken = [self.number(t) for t in inputs]
        result = func(*args, **kwargs)
        if name == "lift_fresh":
            # What `torch.tensor` makes of numbers.
            self.tape.values[taken[0]].constant = True
        if silent:
            self.handed_on(taken, tensors(result))
            return result
        self.record(name, func, taken, inputs, args, kwargs, tensors(result))
        return result

    def record(
        self, name: str, func: Any, taken: list[int], inputs: list[Tensor], args: Any, kwargs: Any, made: list[Tensor]
    ) -> None:
        step = self.tape.begin()
        constant = all(self.tape.values[i].constant for i in taken)
        written = [t for t in inputs if is_written(func, t, args, kwargs)]
        for tensor in written:
            self.writers[storage(tensor)] = step
        outputs = [self.put(t, step, constant) for t in made]
        outputs += [self.put(t, step, constant) for t in written if not any(t is other for other in made)]
        outputs += self.parts(name, args, made, step)
        line, within = innermost(of_python(sys._getframe(2)))
        self.tape.steps.append(Step(name.strip("_"), within, line, tuple(taken), tuple(outputs)))

    def number(self, tensor: Tensor) -> int:
        """The value that a tensor holds now."""
        known = self.known.get(place(tensor))
        if known is not None:
            there, version, number = known
            if (there() is tensor and version == tensor._version) or self.holds(tensor, number):
                return number
        # Through another view of its memory an operation may have written into it.
        writer = self.writers.get(storage(tensor)) if tensor._version else None
        number = self.put(tensor, writer, False)
        if writer is not None:
            one = self.tape.steps[writer]
            outputs, inputs = (*one.outputs, number), (*one.inputs, *([] if known is None else [known[2]]))
            self.tape.steps[writer] = Step(one.name, one.within, one.line, inputs, outputs)
        return number

    def holds(self, tensor: Tensor, number: int) -> bool:
        """Whether a tensor holds the numbers of a value that lay in its place.

        Torch hands on views as tensors of their own, and lays other arrays where one was.
        """
        return same(fingerprint(to_numpy(tensor)), self.tape.values[number].print)

    def put(self, tensor: Tensor, step: int | None, constant: bool) -> int:
        number = self.tape.add(to_numpy(tensor), step, constant)
        self.known[place(tensor)] = (weakref.ref(tensor), tensor._version, number)
        return number

    def handed_on(self, taken: list[int], made: list[Tensor]) -> None:
        for tensor in made:
            if taken:
                self.known[place(tensor)] = (weakref.ref(tensor), tensor._version, taken[0])
            else:
                self.put(tensor, None, True)

    def parts(self, name: str, args: Any, made: list[Tensor], step: int) -> list[int]:
        """What an operation computes on its way, where other implementations have it apart."""
        inner = PARTS.get(name)
        if inner is None:
            return []
        return [self.tape.add(to_numpy(t), step) for t in inner(made[0], *args)]


def product_parts(result: Tensor, bias: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    """The product without the bias."""
    return [result - bias]


def convolution_parts(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    """The convolution without the bias."""
    return [] if bias is None else [result - bias.reshape(-1, *[1] * (result.ndim - 2))]


def glu_parts(result: Tensor, x: Tensor, dim: int = -1) -> list[Tensor]:
    """Both halves, and the gate."""
    value, gate = x.chunk(2, dim)
    return [value, gate, gate.sigmoid()]


def silu_parts(result: Tensor, x: Tensor) -> list[Tensor]:
    """The gate."""
    return [x.sigmoid()]


def layer_norm_parts(result: Tensor, x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> list[Tensor]:
    """The centred input, the variance, with epsilon, and the normalised input."""
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    return normalised(x, dims, eps)


def normalised(x: Tensor, dims: tuple[int, ...], eps: float) -> list[Tensor]:
    mean = x.mean(dims, keepdim=True)
    squares = x.square()
    variance = (x - mean).square().mean(dims, keepdim=True)
    inverse = (variance + eps).rsqrt()
    found = [mean, x - mean, (x - mean).square(), variance, variance + eps, (variance + eps).sqrt(), inverse]
    return [*found, (x - mean) * inverse, squares, squares.mean(dims, keepdim=True), mean.square()]


def batch_norm_parts(
    result: Tensor, x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any
) -> list[Tensor]:
    """The same with the statistics that were kept."""
    if training or mean is None:
        return normalised(x, (0, *range(2, x.ndim)), rest[-1])
    eps, shape = next(e for e in reversed(rest) if isinstance(e, float)), (1, -1, *[1] * (x.ndim - 2))
    inverse = (variance + eps).rsqrt()
    centred = x - mean.reshape(shape)
    return [centred, variance + eps, (variance + eps).sqrt(), inverse, centred * inverse.reshape(shape)]


def group_norm_parts(
    result: Tensor, x: Tensor, weight: Any, bias: Any, n: int, c: int, rest: int, groups: int, eps: float
) -> list[Tensor]:
    """The same group by group."""
    return normalised(x.reshape(n, groups, -1), (-1,), eps)


def softmax_parts(result: Tensor, x: Tensor, dim: int, *rest: Any) -> list[Tensor]:
    """The largest of each row, what is left without it, its exponentials, and their sum."""
    top = x.amax(dim, keepdim=True)
    return [top, x - top, (x - top).exp(), (x - top).exp().sum(dim, keepdim=True), x.exp()]


PARTS: dict[str, Any] = {
    "addmm": product_parts,
    "baddbmm": product_parts,
    "convolution": convolution_parts,
    "glu": glu_parts,
    "silu": silu_parts,
    "native_layer_norm": layer_norm_parts,
    "native_batch_norm": batch_norm_parts,
    "_native_batch_norm_legit_no_training": batch_norm_parts,
    "native_group_norm": group_norm_parts,
    "_softmax": softmax_parts,
    "_log_softmax": softmax_parts,
}


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in arguments or results, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [t for one in tree for t in tensors(one)] if isinstance(tree, list | tuple) else []


def is_written(func: Any, tensor: Tensor, args: Any, kwargs: Any) -> bool:
    """Whether an operation writes into a tensor that it is given."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            if any(t is tensor for t in tensors(given)):
                return True
    return False


def place(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, and how it is laid out there."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
