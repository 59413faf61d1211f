"""What a torch module would compute if one of its operations were another: edits of single operations by name."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from parity.evidence.calls import Operation, fingerprint
from parity.frameworks.torch.leaves import dtype_name, to_numpy, torch_dtype
from parity.frameworks.torch.modes import Mode

# An operation with its arguments, to be run with others; what it returns takes the operation's place.
Edit = Callable[..., Any]


class Listed(Mode):
    """Put every operation of a module's own code on the record.

    Attributes:
        operations: in the order in which they ran.
        paused: above 0 inside a module that answers as it is told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        # Before it runs: it may write into what it is given.
        given = {path: fingerprint(to_numpy(one)) for path, one in operands(args) if one.is_floating_point()}
        result = func(*args, **kwargs)
        self.operations.append(described(len(self.operations), func, args, kwargs, result, given))
        return result


def described(number: int, func: Any, args: Any, kwargs: Any, result: Any, given: Mapping[tuple[int, ...], int]) -> Operation:
    """An operation without its tensors."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return None
        return tuple(plain(v) for v in value) if isinstance(value, list | tuple) else value

    tensors = [a for a in args if isinstance(a, Tensor)]
    first = result[0] if isinstance(result, tuple | list) and result else result
    return Operation(
        number,
        func.overloadpacket.__name__,
        tuple(tuple(t.shape) for t in tensors),
        tuple(dtype_name(t) for t in tensors),
        tuple(plain(a) for a in args),
        {name: plain(value) for name, value in kwargs.items()},
        tuple(first.shape) if isinstance(first, Tensor) else (),
        any(maskish(t) for t in tensors),
        any(t.is_floating_point() and t.numel() > 1 and bool(((t == 0) | (t == 1)).all()) for t in tensors),
        given,
    )


def operands(args: Any) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The tensors that an operation takes, by their position, or by that of their list and theirs in it."""
    for number, value in enumerate(args):
        for inner, one in enumerate(value) if isinstance(value, list | tuple) else ():
            if isinstance(one, Tensor):
                yield (number, inner), one
        if isinstance(value, Tensor):
            yield (number,), value


def maskish(tensor: Tensor) -> bool:
    """Whether a tensor hides or shows: booleans, or nothing but 0 and what is far below or just one other value."""
    if tensor.dtype == torch.bool:
        return True
    if not tensor.is_floating_point() or tensor.numel() < 2:
        return False
    hidden = (tensor < -1e3) | tensor.isneginf()
    return bool(hidden.any() and (hidden | (tensor == 0)).all())


class Edited(Mode):
    """Run some operations of a module's own code otherwise.

    Args:
        edits: by the number of an operation on the record, the name of an edit and its settings.
    """

    def __init__(self, edits: Mapping[int, tuple[str, Mapping[str, Any]]]):
        super().__init__()
        self.edits, self.seen, self.paused = edits, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        number, self.seen = self.seen, self.seen + 1
        if number not in self.edits:
            return func(*args, **kwargs)
        name, settings = self.edits[number]
        in_place = func.overloadpacket.__name__.endswith("_") and isinstance(args[0], Tensor)
        given = (args[0].clone(), *args[1:]) if in_place else args
        result = EDITS[name](functools.partial(called, func), given, kwargs, **settings)
        return args[0].copy_(result) if in_place else result


def called(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


# ---------------------------------------------------------------- the edits


def argument(run: Edit, args: Any, kwargs: Any, *, index: int, value: Any) -> Any:
    """Another value for one argument."""
    return run(*args[:index], value, *args[index + 1 :], **kwargs) if index < len(args) else run(*args, value, **kwargs)


def keyword(run: Edit, args: Any, kwargs: Any, *, name: str, value: Any) -> Any:
    """Another value for one keyword argument."""
    return run(*args, **{**kwargs, name: value})


def left_out(run: Edit, args: Any, kwargs: Any) -> Any:
    """The first operand as it is."""
    return args[0].clone()


def other_operand(run: Edit, args: Any, kwargs: Any) -> Any:
    """The second operand as it is."""
    return args[1].clone()


def other_sign(run: Edit, args: Any, kwargs: Any, *, operand: int) -> Any:
    """One operand with the other sign."""
    return run(*args[:operand], -args[operand], *args[operand + 1 :], **kwargs)


def inverted(run: Edit, args: Any, kwargs: Any) -> Any:
    """A product for a quotient, or the other way round."""
    return run(args[0], 1 / args[1], *args[2:], **kwargs)


def scaled_input(run: Edit, args: Any, kwargs: Any, *, factor: float) -> Any:
    """The first operand times a number."""
    return run(args[0] * factor, *args[1:], **kwargs)


def scaled_output(run: Edit, args: Any, kwargs: Any, *, factor: float) -> Any:
    """The result times a number."""
    return run(*args, **kwargs) * factor


def scaled_operand(run: Edit, args: Any, kwargs: Any, *, operand: int, factor: float) -> Any:
    """One operand times a number."""
    return run(*args[:operand], args[operand] * factor, *args[operand + 1 :], **kwargs)


def divided_by(run: Edit, args: Any, kwargs: Any, *, number: float) -> Any:
    """The first operand divided by one number."""
    return args[0] / number


def rounded_to_whole(run: Edit, args: Any, kwargs: Any, *, way: str) -> Any:
    """Whole numbers got another way: of a quotient, what is left of one, or of the number itself."""
    of_one: dict[str, Callable[[Tensor], Tensor]] = {
        "floor": torch.floor,
        "trunc": torch.trunc,
        "ceil": torch.ceil,
        "round": torch.round,
        "half up": lambda x: (x + 0.5).floor(),
        "half away": lambda x: x.sign() * (x.abs() + 0.5).floor(),
    }
    name = func_name(run)
    if name in ("remainder", "fmod"):
        return torch.fmod(args[0], args[1]) if way == "trunc" else torch.remainder(args[0], args[1])
    if len(args) > 1:
        quotient = of_one[way](args[0].double() / args[1])
        return quotient.to(run(*args, **kwargs).dtype)
    return of_one[way](args[0])


def root_left_out(run: Edit, args: Any, kwargs: Any) -> Any:
    """The number in place of its root, or the inverse of the number in place of that of its root."""
    return args[0].reciprocal() if func_name(run).startswith("rsqrt") else args[0].clone()


def batch_norm(run: Edit, args: Any, kwargs: Any, *, way: str, epsilon: float) -> Any:
    """A norm by given statistics, or by those of all that has one channel, with its root left out or an epsilon beside it."""
    x, weight, bias, mean, variance = args[:5]
    result = run(*args, **kwargs)
    others = tuple(axis for axis in range(x.ndim) if axis != 1)
    if mean is None or (len(args) > 7 and args[5] is True):
        mean, variance = x.mean(others), x.var(others, correction=0)
    divisor = variance + epsilon if way == "no root" else variance.sqrt() + epsilon
    spread = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
    y = (x - mean.reshape(spread)) / divisor.reshape(spread)
    y = y if weight is None else y * weight.reshape(spread)
    y = y if bias is None else y + bias.reshape(spread)
    return (y, *result[1:]) if isinstance(result, tuple) else y


def twice(run: Edit, args: Any, kwargs: Any, *, operand: int) -> Any:
    """One operand of a sum once more."""
    return run(*args, **kwargs) + args[operand]


def shifted_output(run: Edit, args: Any, kwargs: Any, *, by: float) -> Any:
    """The result plus a number."""
    return run(*args, **kwargs) + by


def plus(run: Edit, args: Any, kwargs: Any, *, by: float) -> Any:
    """The first operand plus a number."""
    return args[0] + by


def summary(run: Edit, args: Any, kwargs: Any, *, dims: Sequence[int], to: str, position: int = 0) -> Any:
    """Another summary of the first operand along some axes, in the shape of the operation's own."""
    own = run(*args, **kwargs)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "mean": lambda x: x.mean(tuple(dims)),
        "sum": lambda x: x.sum(tuple(dims)),
        "largest": lambda x: x.amax(tuple(dims)),
        "smallest": lambda x: x.amin(tuple(dims)),
        "position": lambda x: x.select(dims[0], position),
    }
    values = own[0] if isinstance(own, tuple) else own
    new = ways[to](args[0]).reshape(values.shape)
    return (new, *own[1:]) if isinstance(own, tuple) else new


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "elu": F.elu,
    "leaky relu": F.leaky_relu,
    "leaky relu of slope 0.2": lambda x: F.leaky_relu(x, 0.2),
    "leaky relu of slope 0.1": lambda x: F.leaky_relu(x, 0.1),
    "relu6": F.relu6,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hard tanh": F.hardtanh,
    "hard sigmoid": F.hardsigmoid,
    "hard swish": F.hardswish,
    "softplus": F.softplus,
    "mish": F.mish,
    "selu": F.selu,
    "log sigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "squared relu": lambda x: F.relu(x) ** 2,
    "hard sigmoid of slope 0.2": lambda x: (0.2 * x + 0.5).clamp(0, 1),
    "tanh shrink": F.tanhshrink,
    "soft shrink": F.softshrink,
    "hard shrink": F.hardshrink,
    "exp": torch.exp,
    "sine": torch.sin,
    "cosine": torch.cos,
    "identity": lambda x: x.clone(),
}


def activation(run: Edit, args: Any, kwargs: Any, *, to: str) -> Any:
    """Another function of the first operand; of several results, such as a buffer beside the value, of the first."""
    new, own = ACTIVATIONS[to](args[0]), run(*args, **kwargs)
    return (new, *own[1:]) if isinstance(own, tuple) else new


def function_of(run: Edit, args: Any, kwargs: Any, *, to: str, value: np.ndarray) -> Any:
    """A function of another array, in place of what an operation returns."""
    return ACTIVATIONS[to](torch.from_numpy(value)).reshape(run(*args, **kwargs).shape)


def slope(run: Edit, args: Any, kwargs: Any, *, value: float) -> Any:
    """Leaky with another slope."""
    return F.leaky_relu(args[0], value)


def correction(run: Edit, args: Any, kwargs: Any, *, value: int) -> Any:
    """Another divisor of a variance: n - value."""
    return run(*args, **{**kwargs, "correction": value})


def mean_square(run: Edit, args: Any, kwargs: Any) -> Any:
    """The mean of the squares in place of the variance, over the same axes."""
    own = run(*args, **kwargs)
    dims = tuple(args[1]) if len(args) > 1 and args[1] else tuple(range(args[0].ndim))
    square = (args[0] * args[0]).mean(dims).reshape((own[0] if isinstance(own, tuple) else own).shape)
    return (square, *own[1:]) if isinstance(own, tuple) else square


def epsilon_outside(run: Edit, args: Any, kwargs: Any, *, by: float, inverse: bool) -> Any:
    """A root, or its inverse, with a number added outside of it."""
    root = args[0].sqrt() + by
    return root.reciprocal() if inverse else root


def norm(run: Edit, args: Any, kwargs: Any, *, way: str, epsilon: float | None = None) -> Any:
    """A layer norm computed another way."""
    x, shape, weight, bias, eps = args[:5]
    eps = eps if epsilon is None else epsilon
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    mean, count = x.mean(dims, keepdim=True), math.prod(shape)
    variance = ((x - mean) ** 2).mean(dims, keepdim=True)
    ways: dict[str, Callable[[], Tensor]] = {
        "unbiased": lambda: (x - mean) / (variance * count / max(count - 1, 1) + eps).sqrt(),
        "fast variance": lambda: (x - mean) / ((x * x).mean(dims, keepdim=True) - mean * mean + eps).sqrt(),
        "epsilon outside": lambda: (x - mean) / (variance.sqrt() + eps),
        "without mean": lambda: x / ((x * x).mean(dims, keepdim=True) + eps).sqrt(),
        "without scale": lambda: (x - mean) / (variance + eps).sqrt(),
    }
    y = ways[way]()
    if weight is not None and way != "without scale":
        y = y * weight
    y = y + bias if bias is not None and way != "without scale" else y
    return y, mean, variance


def as_masked_fill(run: Edit, args: Any, kwargs: Any, *, inner: str, settings: Mapping[str, Any]) -> Any:
    """An edit of a masked fill, at a `where` that puts one number in the place of scores."""
    shown = args[1].numel() >= args[2].numel()
    scores, number, hidden = (args[1], args[2], ~args[0]) if shown else (args[2], args[1], args[0])
    whole = torch.broadcast_to(scores, torch.broadcast_shapes(scores.shape, hidden.shape))
    return EDITS[inner](filled_where, (whole, hidden, number), {}, **settings)


def filled_where(scores: Tensor, hidden: Tensor, number: Any) -> Tensor:
    """Scores with a number where they are hidden."""
    return scores.masked_fill(hidden, number)


def set_aside(run: Edit, args: Any, kwargs: Any, *, aside: dict[str, Tensor], at: int) -> Any:
    """The scores as they are, the mask kept for later; True hides."""
    old = args[at]
    if func_name(run) == "where":
        scores, other = args[1], args[2]
        shown = scores.numel() >= other.numel()
        aside["mask"] = ~old if shown else old
        return torch.broadcast_to(scores if shown else other, torch.broadcast_shapes(*(a.shape for a in args))).clone()
    aside["mask"] = old if old.dtype == torch.bool else old < 0
    return args[0].clone()


def hidden_behind(run: Edit, args: Any, kwargs: Any, *, aside: dict[str, Tensor], share: bool) -> Any:
    """Softmax over everything, what the mask hides set to zero behind it; `share` brings the sum back to 1."""
    weights = run(*args, **kwargs).masked_fill(aside["mask"], 0)
    return weights / weights.sum(-1, keepdim=True) if share else weights


def func_name(run: Edit) -> str:
    return str(run.args[0].overloadpacket.__name__)  # type: ignore[attr-defined]


def half(run: Edit, args: Any, kwargs: Any, *, neighbours: bool) -> Any:
    """One half of the channels in place of every other one, or the other way round."""
    x, start, width = args[0], (args[2] if len(args) > 2 else 0) or 0, args[0].shape[-1]
    if neighbours:
        return x[..., (1 if start else 0) : width : 2]
    return x[..., width // 2 :] if start else x[..., : width // 2]


def moved_slice(run: Edit, args: Any, kwargs: Any, *, start: int, end: int) -> Any:
    """A slice that begins and ends elsewhere."""
    return run(*args[:2], start, end, *args[4:], **kwargs)


def halves(run: Edit, args: Any, kwargs: Any) -> Any:
    """Neighbouring channels where an operation splits into halves."""
    return [args[0][..., ::2], args[0][..., 1::2]]


def interleaved(run: Edit, args: Any, kwargs: Any) -> Any:
    """Two halves of channels laid in turn where they are laid behind each other."""
    return torch.stack(list(args[0]), -1).flatten(-2)


def behind_each_other(run: Edit, args: Any, kwargs: Any) -> Any:
    """Two halves of channels laid behind each other where they are laid in turn."""
    own = run(*args, **kwargs)
    return torch.cat(list(args[0]), -1).reshape(own.shape)


def causal(run: Edit, args: Any, kwargs: Any, *, steps: int) -> Any:
    """Scores behind a causal mask where there is none."""
    hidden = shifted(torch.zeros(args[0].shape[-2:], dtype=torch.bool), steps)
    return run(args[0].masked_fill(hidden, float("-inf")), *args[1:], **kwargs)


def softmax(run: Edit, args: Any, kwargs: Any, *, hidden: str) -> Any:
    """What a row of which everything is hidden gets."""
    x, dim = args[0], args[1]
    gone = (x <= -1e3).all(dim, keepdim=True)
    even = torch.full_like(x, 1.0 / x.shape[dim])
    fill = {"uniform": even, "zero": torch.zeros_like(x), "nan": torch.full_like(x, float("nan"))}[hidden]
    return torch.where(gone, fill, torch.softmax(x, dim))


def grown(mask: Tensor, steps: Sequence[int], shows: bool) -> Tensor:
    """What is shown, or hidden, also that many keys further on; True hides, and nothing is beyond the edge."""
    marked = mask if not shows else ~mask
    new, keys = marked.clone(), mask.shape[-1]
    for step in steps:
        moved = marked.roll(step, -1)
        edge = slice(0, step) if step > 0 else slice(keys + step, keys)
        moved[..., edge] = False
        new = new | moved
    return ~new if shows else new


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "shows one more before": lambda m: grown(m, (-1,), True),
    "shows one more behind": lambda m: grown(m, (1,), True),
    "shows one more at both ends": lambda m: grown(m, (1, -1), True),
    "hides one more before": lambda m: grown(m, (1,), False),
    "hides one more behind": lambda m: grown(m, (-1,), False),
    "hides one more at both ends": lambda m: grown(m, (1, -1), False),
    "inverted": torch.logical_not,
    "shifted left": lambda m: m.roll(-1, -1),
    "shifted right": lambda m: m.roll(1, -1),
    "shifted up": lambda m: m.roll(-1, -2),
    "shifted down": lambda m: m.roll(1, -2),
    "transposed": lambda m: m.transpose(-1, -2),
    "reversed": lambda m: m.flip(-1),
}


def shifted(mask: Tensor, steps: int) -> Tensor:
    """A causal mask with its diagonal elsewhere: True hides."""
    rows, columns = mask.shape[-2:]
    return torch.ones(rows, columns, dtype=torch.bool, device=mask.device).triu(1 + steps).expand(mask.shape)


def mask(run: Edit, args: Any, kwargs: Any, *, way: str, at: int, steps: int = 0) -> Any:
    """Another mask, as the operand at that place."""
    old = args[at]
    boolean = old if old.dtype == torch.bool else old < 0
    if way == "broadcast over queries":
        new = across(boolean)
    else:
        causal = {"causal": lambda: shifted(boolean, steps), "causal shown": lambda: ~shifted(boolean, steps)}
        # Lined up at the bottom right, as queries behind cached keys are.
        causal["window"] = lambda: boolean | ~shifted(boolean, boolean.shape[-1] - boolean.shape[-2] - steps)
        new = causal[way]() if way in causal else MASKS[way](boolean)
    if old.dtype != torch.bool:
        new = torch.where(new, old.min(), torch.zeros_like(old.min()))
    return run(*args[:at], new, *args[at + 1 :], **kwargs)


def across(boolean: Tensor) -> Tensor:
    """A mask (batch, 1, 1, keys), read as one row for each query: (queries, keys) of a batch as long as the queries."""
    batch, keys = boolean.shape[0], boolean.shape[-1]
    return boolean.reshape(batch, -1, keys)[:, 0][None, None]


def mask_as_number(run: Edit, args: Any, kwargs: Any, *, sign: float) -> Any:
    """The mask added to the scores as 0 and 1."""
    shown = args[1].to(args[0].dtype) if sign > 0 else (~args[1].bool()).to(args[0].dtype)
    return args[0] + shown


def number_as_mask(run: Edit, args: Any, kwargs: Any, *, shows: bool) -> Any:
    """A mask of 0 and 1 taken for a switch, where it is added."""
    product = func_name(run) == "baddbmm"
    numbers, scores = (args[0], run(torch.zeros_like(args[0]), *args[1:], **kwargs)) if product else (args[1], args[0])
    hidden = (numbers == 0) if shows else (numbers != 0)
    return scores.masked_fill(hidden, float("-inf"))


def fill_added(run: Edit, args: Any, kwargs: Any, *, value: float) -> Any:
    """Hidden scores with a number added, where they are replaced."""
    return torch.where(args[1], args[0] + value, args[0])


def refilled(run: Edit, args: Any, kwargs: Any, *, value: float) -> Any:
    """Hidden scores replaced by a number, where a mask is added to them."""
    return torch.where(args[1] < -1e3, torch.full((), value, dtype=args[0].dtype), args[0] + args[1])


def filled(run: Edit, args: Any, kwargs: Any, *, value: float) -> Any:
    """An array made of another number."""
    return torch.full_like(run(*args, **kwargs), value)


REDUCTIONS: dict[str, Callable[[Tensor, Any, bool], Tensor]] = {
    "mean": lambda x, dim, keep: x.mean(dim, keepdim=keep),
    "sum": lambda x, dim, keep: x.sum(dim, keepdim=keep),
    "largest": lambda x, dim, keep: x.amax(dim, keepdim=keep),
    "smallest": lambda x, dim, keep: x.amin(dim, keepdim=keep),
    "median": lambda x, dim, keep: x.quantile(0.5, dim if isinstance(dim, int) else dim[0], keepdim=keep),
    "log of the sum of exponentials": lambda x, dim, keep: x.logsumexp(dim, keepdim=keep),
    "standard deviation": lambda x, dim, keep: x.std(dim, correction=0, keepdim=keep),
    "variance": lambda x, dim, keep: x.var(dim, correction=0, keepdim=keep),
    "root of the mean square": lambda x, dim, keep: (x * x).mean(dim, keepdim=keep).sqrt(),
    "length": lambda x, dim, keep: (x * x).sum(dim, keepdim=keep).sqrt(),
    "square of the length": lambda x, dim, keep: (x * x).sum(dim, keepdim=keep),
    "sum of absolute values": lambda x, dim, keep: x.abs().sum(dim, keepdim=keep),
    "largest absolute value": lambda x, dim, keep: x.abs().amax(dim, keepdim=keep),
    "softmax": lambda x, dim, keep: x.softmax(dim),
    "log softmax": lambda x, dim, keep: x.log_softmax(dim),
    "sigmoid": lambda x, dim, keep: x.sigmoid(),
}


def reduced(run: Edit, args: Any, kwargs: Any, *, to: str, dim: Any, keep: bool) -> Any:
    """Another summary along the same axes."""
    before = run(*args, **kwargs)
    result = REDUCTIONS[to](args[0], list(dim) if isinstance(dim, tuple) else dim, keep)
    return (result, *before[1:]) if isinstance(before, tuple) else result


def loss(run: Edit, args: Any, kwargs: Any, *, way: str) -> Any:
    """The negative logarithms of the likelihoods put together otherwise."""
    scores, ids, weight, _, ignored = args[:5]
    own = run(*args, **kwargs)
    if way == "all":
        return run(scores, ids, weight, 1, -(2**31))
    total = run(scores, ids, weight, 2, ignored)[0]
    return (total if way == "sum" else total / ids.numel(), *own[1:])


def reshaped(run: Edit, args: Any, kwargs: Any) -> Any:
    """Axes that are moved, got by a bare reshape to the same shape instead."""
    result = run(*args, **kwargs)
    return args[0].reshape(result.shape)


def split_minor(run: Edit, args: Any, kwargs: Any, *, axis: int) -> Any:
    """An axis split into (heads, width) in the order (width, heads)."""
    shape = list(run(*args, **kwargs).shape)
    shape[axis], shape[axis + 1] = shape[axis + 1], shape[axis]
    return args[0].reshape(shape).transpose(axis, axis + 1)


def joined_minor(run: Edit, args: Any, kwargs: Any, *, axis: int) -> Any:
    """Two axes (heads, width) joined in the order (width, heads)."""
    return args[0].transpose(axis, axis + 1).reshape(run(*args, **kwargs).shape)


def permuted(run: Edit, args: Any, kwargs: Any, *, order: Sequence[int]) -> Any:
    """Axes in another order, laid out anew, so that what follows may join them."""
    return args[0].permute(tuple(order)).contiguous()


def rolled_back(run: Edit, args: Any, kwargs: Any) -> Any:
    """A cyclic shift in the other direction."""
    return run(args[0], [-step for step in args[1]], *args[2:], **kwargs)


def channels_last_first(run: Edit, args: Any, kwargs: Any) -> Any:
    """Channels moved to the end before all is laid in one row."""
    return args[0].movedim(1, -1).reshape(run(*args, **kwargs).shape)


def parts(run: Edit, args: Any, kwargs: Any, *, order: Sequence[int]) -> Any:
    """The pieces of a split in another order."""
    pieces = run(*args, **kwargs)
    return [pieces[i] for i in order]


def convolution(run: Edit, args: Any, kwargs: Any, **change: Any) -> Any:
    """A convolution with other padding, stride or dilation, of other groups, or with a kernel laid otherwise."""
    x, weight, bias, stride, padding, dilation, transposed, extra, groups = args
    stride, dilation = change.get("stride", stride), change.get("dilation", dilation)
    if "border" in change:
        # What was padded beforehand, padded anew.
        inner = tuple(slice(low, size - high) for (low, high), size in zip(change["pads"], x.shape[2:], strict=True))
        x = F.pad(x[:, :, *inner], sides(change["pads"]), mode=change["border"])
    elif "pads" in change:
        x, padding = F.pad(x, sides(change["pads"]), mode=change.get("mode", "constant")), [0] * len(padding)
    if change.get("flip"):
        weight = weight.flip(tuple(range(2, weight.ndim)))
    if change.get("swap"):
        weight = weight.transpose(-1, -2)
    if "filters" in change:
        weight = dealt_out(weight.transpose(0, 1), change["filters"]).transpose(0, 1)
    if change.get("channels"):
        weight = weight.transpose(0, 1)
    x = dealt_out(x, groups) if change.get("groups") in ("in", "both") else x
    if "starts" in change:
        return transposed_from(run, (x, weight, bias, stride, dilation, groups), change["starts"], change["size"])
    result = run(x, weight, bias, stride, padding, dilation, transposed, extra, groups, **kwargs)
    return dealt_out(result, groups, back=True) if change.get("groups") in ("out", "both") else result


def sides(pads: Sequence[tuple[int, int]]) -> list[int]:
    """Padding as `F.pad` takes it: the last axis first."""
    return [side for low, high in reversed(pads) for side in (low, high)]


def dealt_out(x: Tensor, groups: int, *, back: bool = False) -> Tensor:
    """Channels (number in the group, group) as (group, number in it), or back."""
    parts = (groups, x.shape[1] // groups) if back else (x.shape[1] // groups, groups)
    return x.unflatten(1, parts).transpose(1, 2).flatten(1, 2)


def transposed_from(run: Edit, given: Any, starts: Sequence[int], size: Sequence[int]) -> Tensor:
    """What a transposed convolution makes without padding, from an element on, so many elements; zeros where there is none."""
    x, weight, bias, stride, dilation, groups = given
    none = [0] * len(size)
    whole = run(x, weight, None, stride, none, dilation, True, none, groups)
    pads = [(-start, start + count - have) for start, count, have in zip(starts, size, whole.shape[2:], strict=True)]
    whole = F.pad(whole, sides(pads))
    return whole if bias is None else whole + bias.reshape(1, -1, *(1 for _ in size))


def pool(run: Edit, args: Any, kwargs: Any, *, way: str, pads: Sequence[tuple[int, int]], fill: float, count: bool) -> Any:
    """A pool with other padding: the largest value of each window, or the mean of all of it or of what is no padding."""
    x, size = args[0], args[1]
    options = {"kernel_size": size, "stride": (args[2] if len(args) > 2 else None) or size}
    pools: dict[int, dict[str, Callable[..., Tensor]]] = {
        1: {"largest": F.max_pool1d, "mean": F.avg_pool1d},
        2: {"largest": F.max_pool2d, "mean": F.avg_pool2d},
        3: {"largest": F.max_pool3d, "mean": F.avg_pool3d},
    }
    apply = pools[len(pads)][way]
    result = apply(F.pad(x, sides(pads), value=fill), **options)
    if way == "mean" and not count:
        result = result / apply(F.pad(torch.ones_like(x), sides(pads)), **options)
    before = run(*args, **kwargs)
    return (result, *before[1:]) if isinstance(before, tuple) else result


def padded(run: Edit, args: Any, kwargs: Any, *, pads: Sequence[int]) -> Any:
    """Padded by other numbers of elements."""
    return run(args[0], list(pads), *args[2:], **kwargs)


def padded_as(run: Edit, args: Any, kwargs: Any, *, pads: Sequence[int], mode: str, value: float = 0.0) -> Any:
    """Padded with a number, or with elements of the array in an order that NumPy has a name for."""
    x = args[0]
    if mode == "constant":
        return F.pad(x, list(pads), value=value)
    for number, (low, high) in enumerate(zip(pads[::2], pads[1::2])):
        axis = x.ndim - 1 - number
        order = np.pad(np.arange(x.shape[axis]), (low, high), mode=mode)  # type: ignore[call-overload]
        x = x.index_select(axis, torch.from_numpy(order))
    return x


def windows(run: Edit, args: Any, kwargs: Any, *, size: Sequence[int], stride: Sequence[int]) -> Any:
    """Means of windows of one size, so many as an adaptive pool makes."""
    own = run(*args, **kwargs)
    result = F.avg_pool2d(args[0], list(size), list(stride))
    return result[..., : own.shape[-2], : own.shape[-1]]


def tiled(run: Edit, args: Any, kwargs: Any) -> Any:
    """The whole repeated one after the other, where each element is repeated beside itself."""
    x, own = args[0], run(*args, **kwargs)
    return x.repeat(*(new // old for new, old in zip(own.shape, x.shape, strict=True)))


def blocks_of_channels(run: Edit, args: Any, kwargs: Any, *, axis: int, count: int) -> Any:
    """An axis made as (channel, place in the window), in the order (place, channel)."""
    own = run(*args, **kwargs)
    return own.unflatten(axis, (-1, count)).transpose(axis, axis + 1).flatten(axis, axis + 1)


def gated(run: Edit, args: Any, kwargs: Any, *, value: str, gate: str, exchanged: bool = False) -> Any:
    """A gated linear unit with other functions of its halves, or with the halves exchanged."""
    halves = args[0].chunk(2, args[1] if len(args) > 1 else -1)
    first, second = halves[::-1] if exchanged else halves
    return ACTIVATIONS[value](first) * ACTIVATIONS[gate](second)


def resized(run: Edit, args: Any, kwargs: Any, *, mode: str, antialias: bool = False, corners: bool | None = None) -> Any:
    """Resized to the same size another way."""
    size = tuple(run(*args, **kwargs).shape[2:])
    return F.interpolate(args[0], size=size, mode=mode, antialias=antialias, align_corners=corners)


def depth_major(run: Edit, args: Any, kwargs: Any) -> Any:
    """Pixels made of channels (row, column, channel), not (channel, row, column)."""
    x, factor = args[0], args[1]
    return run(x.unflatten(1, (factor * factor, -1)).transpose(1, 2).flatten(1, 2), factor)


def joined(run: Edit, args: Any, kwargs: Any, *, order: Sequence[int]) -> Any:
    """Pieces put together in another order."""
    return run([args[0][i] for i in order], *args[1:], **kwargs)


def substituted(run: Edit, args: Any, kwargs: Any, *, path: tuple[int, ...], value: Any) -> Any:
    """Another array in place of one that is given, at a position, or at one in a list there."""
    new, here = list(args), torch.from_numpy(value)
    if len(path) == 1:
        new[path[0]] = here.to(new[path[0]].dtype)
    else:
        inner = list(new[path[0]])
        inner[path[1]] = here.to(inner[path[1]].dtype)
        new[path[0]] = inner
    return run(*new, **kwargs)


def wrapped(run: Edit, args: Any, kwargs: Any) -> Any:
    """Whole numbers cut to 32 bits, as they are in JAX without 64-bit types."""

    def cut(value: Any) -> Any:
        return value.to(torch.int32).to(value.dtype) if isinstance(value, Tensor) and value.dtype == torch.int64 else value

    return cut(run(*(cut(a) for a in args), **kwargs))


def nearest_exact(run: Edit, args: Any, kwargs: Any) -> Any:
    """The nearest value by the centres of pixels."""
    size = run(*args, **kwargs).shape[2:]
    return F.interpolate(args[0], size=tuple(size), mode="nearest-exact")


def rounded(run: Edit, args: Any, kwargs: Any, *, dtype: str, where: str) -> Any:
    """Operands or the result cut to a narrower dtype."""

    def cut(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        if dtype == "tf32":
            return tensor_core(value) if floating else value
        return value.to(torch_dtype(dtype)).to(value.dtype) if floating else value

    if where == "operands":
        return run(*(cut(a) for a in args), **kwargs)
    result = run(*args, **kwargs)
    return type(result)(cut(r) for r in result) if isinstance(result, tuple | list) else cut(result)


def tensor_core(x: Tensor) -> Tensor:
    """A float32 mantissa cut to 10 bits; other dtypes as they are."""
    if x.dtype != torch.float32:
        return x
    return ((x.contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


def logic(run: Edit, args: Any, kwargs: Any, *, way: str) -> Any:
    """Two masks joined otherwise."""
    ways = {"or": torch.logical_or, "and": torch.logical_and, "xor": torch.logical_xor}
    return ways[way](args[0], args[1])


EDITS: dict[str, Edit] = {
    "permuted": permuted,
    "divided by": divided_by,
    "rounded to whole": rounded_to_whole,
    "loss": loss,
    "scaled operand": scaled_operand,
    "root left out": root_left_out,
    "batch norm": batch_norm,
    "windows": windows,
    "tiled": tiled,
    "blocks of channels": blocks_of_channels,
    "rolled back": rolled_back,
    "argument": argument,
    "keyword": keyword,
    "left out": left_out,
    "other operand": other_operand,
    "other sign": other_sign,
    "inverted": inverted,
    "scaled input": scaled_input,
    "scaled output": scaled_output,
    "twice": twice,
    "shifted output": shifted_output,
    "plus": plus,
    "summary": summary,
    "mean square": mean_square,
    "epsilon outside": epsilon_outside,
    "as masked fill": as_masked_fill,
    "set aside": set_aside,
    "hidden behind": hidden_behind,
    "half": half,
    "moved slice": moved_slice,
    "halves": halves,
    "interleaved": interleaved,
    "behind each other": behind_each_other,
    "activation": activation,
    "function of": function_of,
    "causal": causal,
    "padded as": padded_as,
    "slope": slope,
    "correction": correction,
    "norm": norm,
    "softmax": softmax,
    "mask": mask,
    "mask as number": mask_as_number,
    "number as mask": number_as_mask,
    "fill added": fill_added,
    "refilled": refilled,
    "filled": filled,
    "reduced": reduced,
    "reshaped": reshaped,
    "split minor": split_minor,
    "joined minor": joined_minor,
    "channels last first": channels_last_first,
    "parts": parts,
    "convolution": convolution,
    "pool": pool,
    "nearest exact": nearest_exact,
    "padded": padded,
    "gated": gated,
    "resized": resized,
    "depth major": depth_major,
    "joined": joined,
    "substituted": substituted,
    "wrapped": wrapped,
    "rounded": rounded,
    "logic": logic,
}
