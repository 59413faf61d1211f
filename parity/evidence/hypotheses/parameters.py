"""Weights that are not torch's, or that the Flax code uses otherwise than torch does."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from parity.evidence.calls import fingerprint
from parity.evidence.hypotheses.suspect import Suspect, Values, Variant
from parity.evidence.hypotheses.weight import Arrays, Weight
from parity.evidence.trial import is_array

GATES = {"LSTM": "ifgo", "LSTMCell": "ifgo", "GRU": "rzn", "GRUCell": "rzn"}
COPY = "copy it again with parity.transfer(torch_model, flax_model)"


def with_weights(suspect: Suspect, weights: Mapping[str, np.ndarray]) -> Callable[[], Values]:
    return lambda: suspect.again(weights=weights)


# ---------------------------------------------------------------- the arrays differ


def not_torchs(suspect: Suspect) -> Iterator[Variant]:
    """Flax's arrays are others than torch's: torch's module with Flax's arrays shows it, the arrays tell how."""
    unequal = [weight for weight in suspect.weights if not weight.equal]
    if not unequal:
        return
    whole = {weight.path: weight.flax for weight in unequal}
    yield Variant(*ways_of(unequal, suspect.arrays), with_weights(suspect, whole))


def ways_of(unequal: Sequence[Weight], arrays: Arrays) -> tuple[str, str]:
    """How the arrays of one module that are not torch's come from torch's, and what to do."""
    told = [(weight, way_of(weight, arrays)) for weight in unequal]
    strangers = [w for w, way in told if not way]
    first = len(unequal) == len(arrays.own) and all(w in strangers or initial(w.flax) for w in unequal)
    if strangers and first and all(unrelated(w) for w in strangers):
        name = ", ".join(w.path for w in unequal)
        what = f"{name}: Flax's have nothing to do with torch's: they were not loaded, and hold their first random values"
        return what, "copy the weights with parity.transfer(torch_model, flax_model)"
    return "; ".join(f"{weight.path}: {way or count_of(weight)}" for weight, way in told), COPY


def way_of(weight: Weight, arrays: Arrays) -> str:
    """How Flax's array comes from torch's, '' if that is not known."""
    mine, theirs = weight.torch, weight.flax
    if not initial(theirs):
        for other in arrays.of_shape(theirs.shape):
            if other.path != weight.path and np.array_equal(other.torch, theirs):
                return f"Flax has torch's {other.path} there"
    if len(weight.pairs) > 1:
        blocks = [Weight(one.source.path, [one]) for one in weight.pairs]
        told = [f"{block.path.rpartition('.')[2]}: {way_of(block, arrays)}" for block in blocks if not block.equal]
        if all(not sentence.endswith(": ") for sentence in told):
            return "; ".join(told)
    for what, array in (*misread(weight), *reordered(mine, blocks_of(arrays.kinds, weight)), *permuted(mine, theirs)):
        if array.shape == theirs.shape and np.array_equal(array, theirs):
            return what
    if initial(theirs) and mine.ndim == 1:
        return f"in Flax it is {theirs.flat[0]:g} everywhere, its initial value: it was not loaded"
    for dtype in (ml_dtypes.bfloat16, np.float16, np.float32):
        with np.errstate(over="ignore"):
            if np.array_equal(mine.astype(dtype).astype(mine.dtype), theirs):
                return f"Flax's was rounded to {np.dtype(dtype)} on its way"
    factor = scale_of(mine, theirs)
    return f"Flax's is {factor:.6g} times torch's" if factor else ""


def initial(array: np.ndarray) -> bool:
    """Whether it is what biases and scales begin with."""
    return bool(array.size and (array == array.flat[0]).all() and array.flat[0] in (0, 1))


def permuted(mine: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Rows or columns in another order, told as heads and widths exchanged where it is that."""
    for axis in range(min(mine.ndim, 2)) if mine.shape == theirs.shape else ():
        places = {row.tobytes(): number for number, row in enumerate(np.moveaxis(mine, axis, 0))}
        order = [places.get(row.tobytes(), -1) for row in np.moveaxis(theirs, axis, 0)]
        if len(places) != mine.shape[axis] or sorted(order) != list(range(len(order))):
            continue
        size, axes = len(order), {0: "rows (outputs)", 1: "columns (inputs)"}
        cuts = [n for n in range(2, size) if size % n == 0 and order == list(np.arange(size).reshape(n, -1).T.ravel())]
        which = f": cut into {cuts[0]} and {size // cuts[0]}, those are exchanged, as heads and widths may be" if cuts else ""
        yield f"Flax's has torch's {axes[axis]} in another order{which}", np.take(mine, order, axis)


def misread(weight: Weight) -> Iterator[tuple[str, np.ndarray]]:
    """A torch array laid out otherwise than the rule says."""
    mine = weight.torch
    if mine.ndim == 2 and mine.shape[0] == mine.shape[1]:
        yield "Flax's is transposed once too often or not at all", mine.T
    if mine.ndim == 2 and weight.raw is not None and weight.raw.size == mine.size:
        layout = weight.pairs[0].layout.inverse()
        yield "Flax's was reshaped where it must be transposed", np.asarray(layout.apply(mine.reshape(weight.raw.shape)))
    if weight.raw is not None and weight.raw.ndim > mine.ndim:
        yield from other_heads(weight)
    if mine.ndim > 2:
        yield from moved(mine)
        if weight.raw is not None:
            layout = weight.pairs[0].layout.inverse()
            yield "Flax's was reshaped where its axes must be moved", np.asarray(layout.apply(mine.reshape(weight.raw.shape)))


def other_heads(weight: Weight) -> Iterator[tuple[str, np.ndarray]]:
    """A Flax array with an axis for its heads, with heads and width, or other axes, exchanged."""
    layout, pair = weight.pairs[0].layout, weight.pairs[0]
    right, back = np.asarray(layout.apply(weight.torch)), layout.inverse()
    for first, second in itertools.combinations(range(right.ndim), 2):
        turned = right.swapaxes(first, second)
        if turned.shape == right.shape:
            yield f"axes {first} and {second} of Flax's {pair.target.path} are exchanged", np.asarray(back.apply(turned))
        # The same memory read in the other order: (width, heads) where Flax has (heads, width).
        for read in (turned.reshape(right.shape), right.reshape(turned.shape).swapaxes(first, second)):
            if second == first + 1:
                name = f"axes {first} and {second} of Flax's {pair.target.path}"
                yield f"{name} were split in the other order", np.asarray(back.apply(read))


def moved(mine: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """A kernel of several axes with some of them exchanged or turned round."""
    spatial = tuple(range(2, mine.ndim))
    yield "Flax's is turned round in space", np.flip(mine, spatial)
    for axes in itertools.permutations(range(mine.ndim)):
        turned = mine.transpose(axes)
        if axes == tuple(range(mine.ndim)) or turned.shape != mine.shape:
            continue
        what = "inputs and outputs" if axes[:2] == (1, 0) else "its axes"
        yield f"Flax's has {what} exchanged: torch's axes in the order {axes}", turned
        yield f"Flax's has torch's axes in the order {axes}, turned round in space", np.flip(turned, spatial)


def blocks_of(kinds: Sequence[str], weight: Weight) -> tuple[str, ...]:
    """The blocks of rows of which a torch array is made up."""
    for kind, gates in GATES.items():
        if f"torch.nn.{kind}" in kinds and weight.name.startswith(("weight_", "bias_")):
            return tuple(gates)
    if weight.name.startswith("in_proj"):
        return ("q", "k", "v")
    return ()


def reordered(mine: np.ndarray, names: tuple[str, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """Blocks of rows in another order."""
    if not names or mine.shape[0] % len(names):
        return
    blocks = np.split(mine, len(names))
    for order in itertools.permutations(range(len(names))):
        if order != tuple(range(len(names))):
            was, got = ", ".join(names), ", ".join(names[i] for i in order)
            yield f"torch's blocks {was} are read as {got}", np.concatenate([blocks[i] for i in order])


def unrelated(weight: Weight) -> bool:
    """Whether Flax's numbers tell nothing of torch's."""
    a, b = weight.torch.astype(np.float64).ravel(), weight.flax.astype(np.float64).ravel()
    if np.isclose(a, b).mean() > 0.1:
        return False
    a, b = a - a.mean(), b - b.mean()
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    # Of n random pairs the correlation is about 1 / sqrt(n).
    return size == 0 or abs(float(a @ b)) / size < max(0.5, 4 / np.sqrt(a.size)) or a.size < 8


def count_of(weight: Weight) -> str:
    wrong = weight.torch != weight.flax
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    values = f"expected (torch) {weight.torch[at]!s}, actual (flax) {weight.flax[at]!s} at {at}"
    return f"{int(wrong.sum())} of {wrong.size} values of Flax's differ, {values}"


def scale_of(mine: np.ndarray, theirs: np.ndarray) -> float | None:
    size = float((mine.astype(np.float64) ** 2).sum())
    factor = float((mine.astype(np.float64) * theirs).sum()) / size if size else 0.0
    near_one = abs(factor - 1) < 1e-4
    return factor if factor and not near_one and np.allclose(theirs, factor * mine, rtol=1e-6, atol=0) else None


# ---------------------------------------------------------------- the arrays are the same, the code is not


def bias(suspect: Suspect) -> Iterator[Variant]:
    """A bias, or all of one kind, forgotten or added twice."""
    named = [(w.path, w.torch, w.name) for w in suspect.weights] + [
        (u.path, u.read(), u.name) for u in suspect.unpaired_weights
    ]
    biases = [(path, array) for path, array, name in named if "bias" in name and array.any()]
    groups = [[one] for one in biases] + ([biases] if len(biases) > 1 else [])
    for group in groups:
        names = ", ".join(path for path, _ in group)
        for factor, what, change in ((0, "is not added", "add it"), (2, "is added twice", "add it once")):
            weights = {path: factor * array for path, array in group}
            yield Variant(f"{names} {what}", f"{change}: {names}", with_weights(suspect, weights))


def unused(suspect: Suspect) -> Iterator[Variant]:
    """A scale forgotten, or read as an offset from one."""
    yield from factors_left_out(suspect)
    for weight in suspect.weights:
        if weight.torch.ndim != 1 or "weight" not in weight.name:
            continue
        one = np.ones(weight.torch.shape)
        yield Variant(
            f"{weight.path} is not used", f"multiply by the scale {weight.path}", with_weights(suspect, {weight.path: one})
        )
        plus = {weight.path: weight.torch + one}
        yield Variant(
            f"Flax multiplies by 1 + {weight.path}, torch by {weight.path}",
            "multiply by the scale itself",
            with_weights(suspect, plus),
        )


def factors_left_out(suspect: Suspect) -> Iterator[Variant]:
    """A parameter by which torch multiplies, of any shape and name, that Flax leaves out."""
    names = {fingerprint(w.torch.astype(suspect.isolator.dtype or w.torch.dtype)): w.path for w in suspect.weights}
    for op in suspect.named("mul", "div"):
        for path, edit in (((0,), "other operand"), ((1,), "left out")):
            name = names.get(op.operands.get(path, -1))
            if name and len(op.shapes) == 2 and op.shapes[1 - path[0]] == op.shape:
                yield Variant(f"{name} is not used", f"multiply by the scale {name}", suspect.edited([op], edit))


def statistics(suspect: Suspect) -> Iterator[Variant]:
    """Running statistics as they were when the module was made."""
    found = {w.path: w.torch for w in suspect.weights} | {u.path: u.read() for u in suspect.unpaired_weights}
    means = {p: np.zeros_like(a) for p, a in found.items() if p.endswith("running_mean")}
    variances = {p: np.ones_like(a) for p, a in found.items() if p.endswith("running_var")}
    change = "transfer the running statistics too (nnx.BatchStat, the collection batch_stats of Linen)"
    for which, name in (({**means, **variances}, "statistics are"), (means, "mean is"), (variances, "variance is")):
        if which:
            yield Variant(f"the running {name} at the initial value", change, with_weights(suspect, which))


def transposed_in_code(suspect: Suspect) -> Iterator[Variant]:
    """The array is right, but the code multiplies by it the other way round, or slides it turned."""
    for weight in suspect.weights:
        mine = weight.torch
        if mine.ndim == 2 and mine.shape[0] == mine.shape[1] and mine.shape[0] > 1:
            what = f"Flax multiplies by the transpose of {weight.path}"
            yield Variant(what, "x @ kernel, as Flax keeps it: (in, out)", with_weights(suspect, {weight.path: mine.T}))
        if mine.ndim > 2:
            for what, array in moved(mine):
                sentence = f"{weight.path}: {what}"
                change = "turn the kernel round: transpose_kernel=True with the layout of torch, or jnp.flip over its space"
                yield Variant(
                    sentence,
                    change if "round" in what else "exchange the axes back",
                    with_weights(suspect, {weight.path: array}),
                )


def gate_order(suspect: Suspect) -> Iterator[Variant]:
    """Gates of a recurrent layer, or q, k and v, read in another order; a bias that stands inside or outside a gate."""
    arrays = {w.path: (w, blocks_of(suspect.arrays.kinds, w)) for w in suspect.weights}
    extra = {u.path: u for u in suspect.unpaired_weights}
    names = next((n for _, n in arrays.values() if n), ())
    if not names:
        return
    whole = {path: w.torch for path, (w, n) in arrays.items() if n}
    whole |= {p: u.read() for p, u in extra.items() if u.name.startswith(("weight_", "bias_"))}
    count = len(names)
    for order in itertools.permutations(range(count)):
        if order == tuple(range(count)):
            continue
        weights = {
            p: np.concatenate([np.split(a, count)[i] for i in order]) for p, a in whole.items() if a.shape[0] % count == 0
        }
        was, got = ", ".join(names), ", ".join(names[i] for i in order)
        yield Variant(
            f"Flax takes the blocks ({was}) of the weights for ({got})",
            f"split in torch's order: {was}",
            with_weights(suspect, weights),
        )
    second = {p: np.zeros_like(a) for p, a in whole.items() if "bias_hh" in p and a.any()}
    if second:
        yield Variant(
            "the second bias, bias_hh, is not added",
            "add bias_hh inside each gate, as torch does",
            with_weights(suspect, second),
        )
    if suspect.is_a("LSTM", "LSTMCell"):
        moved_bias = {p: plus_one(a, 1, count) for p, a in whole.items() if "bias_ih" in p}
        yield Variant("Flax adds 1 to the forget gate", "add no forget bias", with_weights(suspect, moved_bias))


def plus_one(array: np.ndarray, block: int, count: int) -> np.ndarray:
    rows = array.shape[0] // count
    new = array.astype(np.float64)
    new[block * rows : (block + 1) * rows] += 1
    return new


def per_head(suspect: Suspect) -> Iterator[Variant]:
    """A fused projection cut per head, or heads split with the head axis inside."""
    yield from fused_answers(suspect)
    heads: Any = suspect.torch_layer.settings("num_heads") or suspect.torch_layer.settings("n_heads")
    fused = {w.path: w.torch for w in suspect.weights if w.torch.shape and w.torch.shape[0] % 3 == 0}
    fused = {p: a for p, a in fused.items() if p.rpartition(".")[2].startswith(("in_proj", "qkv", "c_attn"))}
    if not isinstance(heads, int) or not fused:
        return
    weights = {}
    for path, array in fused.items():
        width = array.shape[0] // (3 * heads)
        if width * 3 * heads != array.shape[0]:
            return
        cut = array.reshape(heads, 3, width, *array.shape[1:])
        weights[path] = np.moveaxis(cut, 1, 0).reshape(array.shape)
    yield Variant(
        f"Flax cuts {', '.join(weights)} per head into q, k, v",
        "cut into q, k and v first, then into heads",
        with_weights(suspect, weights),
    )


def fused_answers(suspect: Suspect) -> Iterator[Variant]:
    """What one layer returns for all of q, k and v, cut in another order of pieces, heads and width."""
    cuts = suspect.named("split", "chunk", "split_with_sizes", "unbind", "tensor_split", "slice")
    counts = {2, 3} if cuts else set()
    heads = {size for op in suspect.operations if len(op.shape) > 3 for size in op.shape[1:]} - {1}
    for key in suspect.isolator.children.get(suspect.trial.torch.key, ()) if counts else ():
        one = suspect.isolator.calls[key]
        answers = suspect.trial.replies.get(one.path)
        if answers is None or not is_array(one.output) or one.output.ndim < 2 or one.call or len(answers) > 1:
            continue
        width = one.output.shape[-1]
        for count, head in itertools.product(sorted(counts), sorted(heads)):
            if width % (count * head) or width == count * head:
                continue
            sizes = {"pieces": count, "heads": head, "width": width // (count * head)}
            for order in itertools.permutations(sizes):
                if order != tuple(sizes):
                    # Read in that order, laid in torch's.
                    cut = one.output.reshape(*one.output.shape[:-1], *(sizes[name] for name in order))
                    back = [cut.ndim - 3 + order.index(name) for name in sizes]
                    value = cut.transpose(*range(cut.ndim - 3), *back).reshape(one.output.shape)
                    yield Variant(
                        f"Flax reads what {one.path} returns as ({', '.join(order)}), torch as ({', '.join(sizes)})",
                        f"reshape to ({', '.join(sizes)}): {count} pieces first, then {head} heads",
                        lambda path=one.path, v=value: suspect.again(replies={**suspect.trial.replies, path: [v]}),
                    )


def weight_norm(suspect: Suspect) -> Iterator[Variant]:
    """A parametrised weight of which only the direction is used."""
    arrays = {w.path: w.torch for w in suspect.weights} | {u.path: u.read() for u in suspect.unpaired_weights}
    for path, direction in arrays.items():
        for magnitude, end in (("original0", "original1"), ("weight_g", "weight_v")):
            gain = path.replace(end, magnitude)
            if not path.endswith(end) or gain not in arrays:
                continue
            axes = tuple(i for i in range(direction.ndim) if arrays[gain].shape[i] == 1)
            length = np.sqrt((direction.astype(np.float64) ** 2).sum(axes, keepdims=True))
            yield Variant(
                f"weight norm is ignored: Flax uses {path} as it is",
                f"scale it to the length {gain}: kernel = g * v / ||v||",
                with_weights(suspect, {gain: length}),
            )
            ones = np.ones_like(arrays[gain])
            yield Variant(
                f"the length {gain} was not loaded, and is 1 in Flax", f"copy {gain}", with_weights(suspect, {gain: ones})
            )
