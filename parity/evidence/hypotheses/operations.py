"""One operation of the module is another: its constant, its function, its mask, its order of axes, its precision."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from parity.evidence.calls import Operation
from parity.evidence.hypotheses.suspect import Suspect, Variant
from parity.evidence.hypotheses.tensors import named_factor
from parity.evidence.isolation import is_array
from parity.evidence.numerics import finite_scale, largest_gap, numpy_float
from parity.evidence.trees import mapped

# How many operations of a kind are tried one by one; beyond that only all of them together.
ALONE = 8

NORMS = {"native_layer_norm": 4, "native_group_norm": 7, "native_batch_norm": 7, "batch_norm_no_training": 6}
NORMS |= {"native_batch_norm_legit_no_training": 6, "native_batch_norm_legit": 7, "cudnn_batch_norm": 7, "fused_rms_norm": 3}
ADDS = ("add", "clamp_min", "clamp", "maximum")
EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 1e-7, 1e-2, 1e-4, 1e-10)


def groups(chosen: Iterable[Operation]) -> Iterator[tuple[str, list[Operation]]]:
    """All operations of a kind together, those of one shape together, and each alone; with words that tell which."""
    all_ = list(chosen)
    yield "", all_
    if len(all_) < 2:
        return
    shapes: dict[Any, list[Operation]] = {}
    for op in all_:
        shapes.setdefault((op.shapes, op.shape), []).append(op)
    for shape, those in shapes.items():
        if 1 < len(those) < len(all_):
            yield f" where it takes {shape[0][0]}", those
    for number, op in enumerate(all_ if len(all_) <= ALONE else []):
        yield f" (number {number + 1} of {len(all_)})", [op]


# ---------------------------------------------------------------- normalisation


def epsilon(suspect: Suspect) -> Iterator[Variant]:
    """The small number under the root of a norm."""
    for op in suspect.operations:
        name = op.name.rstrip("_").lstrip("_")
        place = NORMS.get(name)
        if place is not None and place < len(op.args) and isinstance(op.args[place], float):
            yield from another_constant(suspect, op, place, op.args[place])
        elif name in ADDS and len(op.args) > 1 and isinstance(op.args[1], float) and 0 < op.args[1] <= 1e-2:
            yield from another_constant(suspect, op, 1, op.args[1])


def another_constant(suspect: Suspect, op: Operation, place: int, mine: float) -> Iterator[Variant]:
    def values(number: float) -> Any:
        return suspect.again({op.number: ("argument", {"index": place, "value": number})})

    tried = [number for number in (*EPSILONS, 0.0) if number != mine]
    for number in tried:
        yield Variant(f"Flax adds {number:g} where torch adds {mine:g}", f"set epsilon={mine:g}", lambda n=number: values(n))
    if any(sum(suspect.explained(values(n))[0].values()) or suspect.explained(values(n))[0] for n in tried):
        return
    found = suspect.solved(values, [mine, *EPSILONS])
    if found is not None:
        for number in (float(f"{found:.3g}"), found):
            yield Variant(
                f"Flax adds {number:.6g} where torch adds {mine:g}", f"set epsilon={mine:g}", lambda n=number: values(n)
            )


def variance(suspect: Suspect) -> Iterator[Variant]:
    """A divisor of n where torch has n - 1, or the other way round; a norm that is another one."""
    for op in suspect.operations:
        if op.name in ("var", "std", "var_mean", "std_mean"):
            mine = op.kwargs.get("correction", 1)
            mine = 1 if mine is None else mine
            yield Variant(
                f"Flax divides the squares by n - {1 - int(mine)}, torch by n - {mine}",
                f"pass ddof={mine} to jnp.{op.name.partition('_')[0]}",
                suspect.edited([op], "correction", value=1 - int(mine)),
            )
        if op.name == "native_layer_norm":
            for way, what, change in (
                ("unbiased", "the variance is divided by n - 1", "divide by n: jnp.var without ddof"),
                ("without mean", "the mean is not subtracted: an RMS norm", "use nnx.LayerNorm"),
                ("epsilon outside", "epsilon is added outside the root", "add it to the variance"),
                ("without scale", "scale and bias are not used", "use both"),
            ):
                yield Variant(what, change, suspect.edited([op], "norm", way=way))
        if op.name == "native_group_norm":
            groups_, channels = op.args[6], op.args[4]
            for count in [c for c in range(1, channels + 1) if channels % c == 0 and c != groups_]:
                yield Variant(
                    f"Flax makes {count} groups, torch {groups_}",
                    f"set num_groups={groups_}",
                    suspect.edited([op], "argument", index=6, value=count),
                )


def batch_statistics(suspect: Suspect) -> Iterator[Variant]:
    """Train mode: what depends on the batch."""
    if suspect.named("native_batch_norm", "native_batch_norm_legit_no_training", "batch_norm", "cudnn_batch_norm"):
        yield Variant(
            "Flax normalises by the batch's own statistics, as in training",
            "call .eval() on the model, or pass use_running_average=True",
            lambda: suspect.again(training=True),
        )


# ---------------------------------------------------------------- activations

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": "silu",
    "elu": "elu",
    "leaky_relu": "leaky relu",
    "hardtanh": "relu6",
    "clamp": "relu6",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "softplus": "softplus",
    "mish": "mish",
    "hardswish": "hard swish",
    "hardsigmoid": "hard sigmoid",
    "log_sigmoid_forward": "log sigmoid",
    "exp": "exp",
}
INSTEAD = {
    "gelu": "jax.nn.gelu(x, approximate=False)",
    "tanh gelu": "jax.nn.gelu(x, approximate=True)",
    "leaky relu": "jax.nn.leaky_relu(x, negative_slope)",
    "silu": "jax.nn.silu(x)",
    "relu": "jax.nn.relu(x)",
    "relu6": "jax.nn.relu6(x)",
    "elu": "jax.nn.elu(x)",
}
FUNCTIONS = ("relu", "gelu", "tanh gelu", "quick gelu", "silu", "elu", "leaky relu", "leaky relu of slope 0.2")
FUNCTIONS += ("leaky relu of slope 0.1", "relu6", "tanh", "sigmoid", "hard tanh", "hard sigmoid", "hard swish", "softplus")
FUNCTIONS += ("mish", "selu", "log sigmoid", "squared relu", "identity")


def function_of(op: Operation) -> str:
    name = ACTIVATIONS.get(op.name.rstrip("_"), "")
    return "tanh gelu" if name == "gelu" and op.kwargs.get("approximate") == "tanh" else name


def activation(suspect: Suspect) -> Iterator[Variant]:
    """Another nonlinearity, or another slope of it."""
    kinds: dict[str, list[Operation]] = {}
    for op in suspect.operations:
        if function_of(op):
            kinds.setdefault(function_of(op), []).append(op)
    for mine, ops in kinds.items():
        for where, chosen in groups(ops):
            for other in FUNCTIONS:
                if other != mine:
                    said = "leaves the function out" if other == "identity" else f"computes {other}"
                    yield Variant(
                        f"Flax {said} where torch computes {mine}{where}",
                        f"use {INSTEAD.get(mine, mine)}",
                        suspect.edited(chosen, "activation", to=other),
                    )
            if mine == "leaky relu":
                yield from slopes(suspect, chosen, where)


def slopes(suspect: Suspect, chosen: list[Operation], where: str) -> Iterator[Variant]:
    mine = chosen[0].args[1] if len(chosen[0].args) > 1 else 0.01

    def values(number: float) -> Any:
        return suspect.edited(chosen, "slope", value=number)()

    found = suspect.solved(values, (0.01, 0.1, 0.2, 0.3, 0.05))
    for number in (0.01, 0.2, 0.1, *([float(f"{found:.3g}")] if found is not None else [])):
        if number != mine:
            yield Variant(
                f"Flax's slope is {number:g}, torch's {mine:g}{where}",
                f"set negative_slope={mine:g}",
                lambda n=number: values(n),
            )


# ---------------------------------------------------------------- attention


def softmax_scale(suspect: Suspect) -> Iterator[Variant]:
    """Scores that are scaled otherwise before softmax."""
    for where, chosen in groups(suspect.named("softmax", "safe_softmax")):
        if not chosen:
            continue

        def values(number: float, chosen: list[Operation] = chosen) -> Any:
            return suspect.edited(chosen, "scaled input", factor=number)()

        for number, name in factors(suspect):
            yield Variant(f"Flax's scores are {name} times torch's{where}", told_scale(number), lambda n=number, v=values: v(n))
        found = suspect.solved(values, (1.0, 2.0, 0.5, 4.0, 0.25))
        if found is not None and not any(math.isclose(found, n, rel_tol=1e-9) for n, _ in factors(suspect)):
            yield Variant(
                f"Flax's scores are {named_factor(found, ())} times torch's{where}",
                f"multiply the scores by {named_factor(1 / found, ())}",
                lambda n=found, v=values: v(n),
            )


def factors(suspect: Suspect) -> list[tuple[float, str]]:
    """The factors by which a scale may be wrong: sizes, their roots, their ratios' roots."""
    sizes = {shape[-1] for op in suspect.named("bmm", "baddbmm", "mm") for shape in op.shapes if shape}
    sizes |= {op.shape[-1] for op in suspect.operations if op.name in ("view", "unsafe_view", "_unsafe_view") and op.shape}
    sizes |= {shape[-1] for op in suspect.operations for shape in op.shapes if len(shape) > 2}
    found: dict[float, str] = {}
    for size in sorted(s for s in sizes if s > 1):
        for number, name in (
            (size**0.5, f"sqrt({size})"),
            (size**-0.5, f"1/sqrt({size})"),
            (float(size), f"{size}"),
            (1 / size, f"1/{size}"),
        ):
            found.setdefault(number, name)
    for a, b in itertools.permutations(sorted(s for s in sizes if s > 1), 2):
        found.setdefault((a / b) ** 0.5, f"sqrt({a}/{b})")
    return [(number, name) for number, name in found.items() if number != 1]


def told_scale(number: float) -> str:
    if number > 1:
        return "divide the scores as torch does: by the root of the head width, once, unless torch's code says otherwise"
    return "scale the scores once, by the root that torch's code takes"


def masking(suspect: Suspect) -> Iterator[Variant]:
    """A mask that hides other places, or that works otherwise."""
    ops = [
        op
        for op in suspect.operations
        if op.masks and op.name.rstrip("_") in ("masked_fill", "where", "add", "baddbmm", "bitwise_not", "logical_not")
    ]
    for where, chosen in groups(ops):
        if not chosen:
            continue
        name = chosen[0].name.rstrip("_")
        if any(op.name.rstrip("_") != name for op in chosen):
            continue
        yield from other_fills(suspect, chosen, name, where)
        yield from other_masks(suspect, chosen, name, where)
    for op in suspect.named("add"):
        if op.switches and len(op.shapes) == 2:
            for shows in (True, False):
                yield Variant(
                    f"a mask of 0 and 1 is a switch in Flax, {'1 shows' if shows else '1 hides'}; torch adds its numbers",
                    "add the mask to the scores, as torch does with masks that are no booleans",
                    suspect.edited([op], "number as mask", shows=shows),
                )
    for op in suspect.named("bitwise_or", "bitwise_and", "logical_or", "logical_and", "mul"):
        if op.dtypes[:2] == ("bool", "bool"):
            for way in ("or", "and", "xor"):
                if way not in op.name:
                    yield Variant(
                        f"Flax joins two masks by {way}",
                        f"join them as torch does: {op.name}",
                        suspect.edited([op], "logic", way=way),
                    )


def other_masks(suspect: Suspect, chosen: list[Operation], name: str, where: str) -> Iterator[Variant]:
    place = {"masked_fill": 1, "where": 0, "add": 1}.get(name)
    if place is None:
        return
    shape = chosen[0].shapes[min(place, len(chosen[0].shapes) - 1)]
    ways = [
        (
            "inverted",
            "the mask is inverted",
            "hide where torch hides: Flax's masks are True where attention is allowed, torch's often where it is not",
        )
    ]
    if shape and shape[-1] > 1:
        ways += [("shifted left", "the mask is shifted by one key", "line it up with the keys")]
        ways += [("shifted right", "the mask is shifted by one key", "line it up with the keys")]
        ways += [("reversed", "the mask runs backwards along the keys", "turn it round")]
    if len(shape) > 1 and shape[-2] > 1:
        ways += [("shifted up", "the mask is shifted by one query", "line it up with the queries")]
        ways += [("shifted down", "the mask is shifted by one query", "line it up with the queries")]
        if shape[-1] == shape[-2]:
            ways += [("transposed", "the mask has queries and keys exchanged", "mask[query, key]")]
    for way, what, change in ways:
        yield Variant(f"{what}{where}", change, suspect.edited(chosen, "mask", way=way, at=place))
    if len(shape) == 4 and shape[1] == shape[2] == 1 and shape[0] > 1:
        yield Variant(
            f"a mask (batch, keys) is read as (queries, keys){where}",
            "mask[:, None, None, :]",
            suspect.edited(chosen, "mask", way="broadcast over queries", at=place),
        )
    if len(shape) > 1 and shape[-2] > 1:
        rows, columns = shape[-2:]
        for steps in sorted({0, columns - rows, 1, -1, columns - rows - 1, columns - rows + 1}):
            named = {0: "lined up at the top left", columns - rows: "lined up at the bottom right"}.get(
                steps, f"moved by {steps}"
            )
            yield Variant(
                f"the causal mask is {named}{where}",
                "line the diagonal up as torch does: jnp.tril(..., k=...)",
                suspect.edited(chosen, "mask", way="causal", at=place, steps=steps),
            )
    if name in ("masked_fill", "add"):
        yield Variant(f"the mask is not used{where}", "pass the mask on", suspect.edited(chosen, "left out"))
    if name == "masked_fill":
        for sign in (1.0, -1.0):
            meaning = "1 where torch hides" if sign > 0 else "0 where torch hides"
            yield Variant(
                f"the mask is added to the scores as numbers, {meaning}{where}",
                "hide by jnp.where(mask, scores, -inf)",
                suspect.edited(chosen, "mask as number", sign=sign),
            )
    if name == "add":
        yield Variant(f"the mask is added twice{where}", "add it once", suspect.edited(chosen, "twice", operand=1))


FILLS = (float("-inf"), -1e20, -1e9, -1e10, -3.4028234663852886e38, -1.7976931348623157e308, -1e4, -1e30, -1e6, 0.0)


def other_fills(suspect: Suspect, chosen: list[Operation], name: str, where: str) -> Iterator[Variant]:
    """Another number in hidden places; it shows where a query sees nothing."""
    if name == "masked_fill" and len(chosen[0].args) > 2 and chosen[0].args[2] is not None:
        mine = chosen[0].args[2]
        for value in FILLS:
            if value != mine:
                finite = f"finite in Flax, as {value:g}," if math.isinf(mine) else f"{value:g} in Flax"
                got = "NaN" if math.isinf(value) else "the average of all values"
                yield Variant(
                    f"hidden scores are {finite} and {mine:g} in torch{where}: a query that sees nothing gets {got}",
                    f"fill with {mine:g}",
                    suspect.edited(chosen, "argument", index=2, value=value),
                )
                if math.isfinite(value) and value:
                    yield Variant(
                        f"{value:g} is added to hidden scores in Flax, torch puts {mine:g} in their place{where}",
                        f"jnp.where(mask, {mine:g}, scores)",
                        suspect.edited(chosen, "fill added", value=value),
                    )


def hidden_rows(suspect: Suspect) -> Iterator[Variant]:
    """What a query gets that sees no key."""
    words = {"uniform": "the average of all values", "zero": "zeros", "nan": "NaN"}
    for where, chosen in groups(suspect.named("softmax", "safe_softmax")):
        for hidden, what in words.items() if chosen else ():
            yield Variant(
                f"a query that sees no key gets {what} in Flax{where}",
                "give such queries what torch gives them: its fill value, and softmax as it stands",
                suspect.edited(chosen, "softmax", hidden=hidden),
            )


def softmax_axis(suspect: Suspect) -> Iterator[Variant]:
    """Softmax, a mean or a sum over another axis."""
    for op in suspect.named("softmax", "log_softmax", "safe_softmax", "mean", "sum", "amax", "cumsum", "argmax"):
        dim = op.args[1] if len(op.args) > 1 else None
        mine = dim[0] if isinstance(dim, tuple) and len(dim) == 1 else dim
        if not isinstance(mine, int) or not op.shapes:
            continue
        ndim = len(op.shapes[0])
        for axis in range(ndim):
            if axis != mine % ndim:
                value: Any = [axis] if isinstance(dim, tuple) else axis
                yield Variant(
                    f"{op.name.strip('_')} runs over axis {axis} in Flax and {mine % ndim} in torch",
                    f"pass axis={mine}",
                    suspect.edited([op], "argument", index=1, value=value),
                )


# ---------------------------------------------------------------- order of axes


def heads(suspect: Suspect) -> Iterator[Variant]:
    """Heads split or merged by a bare reshape, or with heads and width in the other order."""
    moves = [op for op in suspect.operations if op.name in ("transpose", "permute") and len(op.shape) > 2]
    for where, chosen in groups(moves):
        if chosen:
            yield Variant(
                f"axes are moved by a bare reshape where torch transposes {chosen[0].shapes[0]} to {chosen[0].shape}{where}",
                f"transpose to {chosen[0].shape}, then reshape",
                suspect.edited(chosen, "reshaped"),
            )
    views = [op for op in suspect.operations if op.name in ("view", "_unsafe_view", "unsafe_view") and op.shapes]
    splits = [(op, axis) for op in views for axis in [split_axis(op.shapes[0], op.shape)] if axis is not None]
    joins = [(op, axis) for op in views for axis in [split_axis(op.shape, op.shapes[0])] if axis is not None]
    for pairs, edit, word in ((splits, "split minor", "split"), (joins, "joined minor", "merged")):
        for where, chosen in groups(op for op, _ in pairs):
            axis = next((axis for op, axis in pairs if chosen and op.number == chosen[0].number), None)
            if chosen and axis is not None:
                yield Variant(
                    f"heads are {word} in the order (width, heads){where}",
                    f"{word.removesuffix('d')} as (heads, width)",
                    suspect.edited(chosen, edit, axis=axis),
                )


def split_axis(joined: tuple[int, ...], split: tuple[int, ...]) -> int | None:
    """Where one axis of the first shape is two of the second."""
    if len(split) != len(joined) + 1:
        return None
    for axis in range(len(joined)):
        whole = split[axis] * split[axis + 1]
        if split[axis] > 1 and split[axis + 1] > 1 and (*split[:axis], whole, *split[axis + 2 :]) == joined:
            return axis
    return None


def flattened(suspect: Suspect) -> Iterator[Variant]:
    """Channels first or last before all is laid in one row."""
    views = [op for op in suspect.operations if op.name in ("view", "_unsafe_view") and op.shapes and len(op.shapes[0]) > 2]
    for where, chosen in groups(op for op in views if len(op.shape) < len(op.shapes[0])):
        if chosen:
            yield Variant(
                f"Flax lays {chosen[0].shapes[0]} in one row with the channels last{where}",
                "move the channels to the front first, x.transpose(0, 3, 1, 2).reshape(n, -1), or reorder the kernel's rows",
                suspect.edited(chosen, "channels last first"),
            )


def pieces(suspect: Suspect) -> Iterator[Variant]:
    """The pieces of a split (q, k, v; gate and value) in another order."""
    by_count: dict[int, list[Operation]] = {}
    for op in suspect.named("split", "chunk", "split_with_sizes", "unbind", "tensor_split"):
        by_count.setdefault(pieces_of(op), []).append(op)
    for count, ops in by_count.items():
        for (where, chosen), order in itertools.product(
            groups(ops), itertools.permutations(range(count)) if 1 < count <= 4 else ()
        ):
            if order != tuple(range(count)):
                yield Variant(
                    f"the {count} pieces of a split are taken in the order {order}{where}",
                    "take them in torch's order",
                    suspect.edited(chosen, "parts", order=order),
                )


def pieces_of(op: Operation) -> int:
    """How many equal pieces a split makes; 0 if they are not equal."""
    if op.name == "split_with_sizes":
        return len(op.args[1]) if len(set(op.args[1])) == 1 else 0
    dim = op.args[-1] if len(op.args) > (1 if op.name == "unbind" else 2) else 0
    size = op.shapes[0][dim]
    if op.name == "unbind":
        return size
    each = op.shape[dim] if op.shape else 0
    return size // each if each and size % each == 0 else 0


# ---------------------------------------------------------------- convolution, pooling, resizing


def convolving(suspect: Suspect) -> Iterator[Variant]:
    """Padding at the other end, of another kind; a kernel that is not flipped."""
    for op in suspect.named("convolution"):
        stride, padding, dilation, transposed = op.args[3:7]
        spatial = len(padding)
        for change, what, told in (
            (
                {"flip": True},
                "the kernel is not turned round" if transposed else "the kernel is turned round",
                "turn the kernel round in space: transpose_kernel=True, or jnp.flip",
            ),
            ({"swap": True}, "the kernel has its last two axes exchanged", "kernel axes: (height, width, in, out)"),
            ({"channels": True}, "the kernel has inputs and outputs exchanged", "exchange the last two axes of Flax's kernel"),
        ):
            shape = op.shapes[1]
            square = {"swap": shape[-1] == shape[-2] and spatial > 1, "channels": shape[0] == shape[1]}
            if all(square.get(key, True) for key in change):
                yield Variant(what, told, suspect.edited([op], "convolution", **change))
        if transposed:
            for shift in itertools.product((-1, 0, 1), repeat=spatial):
                if any(shift):
                    yield Variant(
                        f"the output is moved by {shift}: other padding",
                        "padding of k - 1 - p at both ends",
                        suspect.edited([op], "convolution", shift=shift),
                    )
            continue
        for pads in paddings(padding, op.shapes[1][2:], stride, dilation):
            yield Variant(
                f"Flax pads by {pads}, torch by {tuple(padding)} at both ends",
                f"set padding={tuple((p, p) for p in padding)}",
                suspect.edited([op], "convolution", pads=pads),
            )
        for mode in ("reflect", "circular", "replicate"):
            if any(padding):
                pads = tuple((p, p) for p in padding)
                yield Variant(
                    f"Flax pads by {mode}, torch by zeros",
                    "pad with zeros",
                    suspect.edited([op], "convolution", pads=pads, mode=mode),
                )


def paddings(padding: Any, kernel: Any, stride: Any, dilation: Any) -> list[tuple[tuple[int, int], ...]]:
    """Other paddings of the same sum at both ends, SAME's and VALID's among them."""
    same = tuple((p, p) for p in padding)
    found = [tuple((0, 2 * p) for p in padding), tuple((2 * p, 0) for p in padding), tuple((0, 0) for _ in padding)]
    total = [d * (k - 1) for k, d in zip(kernel, dilation)]
    found += [tuple((t // 2, t - t // 2) for t in total), tuple((t - t // 2, t // 2) for t in total)]
    # SAME with a stride pads less, and the rest behind.
    less = [max(t + 1 - s, 0) for t, s in zip(total, stride)]
    found += [tuple((t // 2, t - t // 2) for t in less), tuple((t, 0) for t in total)]
    found += [tuple((max(p - 1, 0), p + 1) for p in padding), tuple((p + 1, max(p - 1, 0)) for p in padding)]
    found += [tuple((max(p - 1, 0), p) for p in padding)]
    return [pads for pads in dict.fromkeys(found) if pads != same]


def pooling(suspect: Suspect) -> Iterator[Variant]:
    """Padded zeros counted or not; padding at the other end; the average of the wrong number."""
    for op in suspect.operations:
        if op.name in ("avg_pool2d", "avg_pool3d", "avg_pool1d"):
            mine = op.args[5] if len(op.args) > 5 else True
            if len(op.args) > 5:
                yield Variant(
                    f"an average counts padded zeros {'in torch' if mine else 'in Flax'} alone",
                    f"pass count_include_pad={mine}",
                    suspect.edited([op], "argument", index=5, value=not mine),
                )
            else:
                yield Variant(
                    "an average counts padded zeros in torch alone",
                    "pass count_include_pad=True",
                    suspect.edited([op], "count pad", include=False),
                )


def resizing(suspect: Suspect) -> Iterator[Variant]:
    """Corners lined up or not."""
    for op in suspect.operations:
        if op.name.startswith(("upsample_bilinear", "upsample_linear", "upsample_bicubic", "upsample_trilinear")):
            mine = op.args[2]
            if isinstance(mine, bool):
                yield Variant(
                    f"Flax lines up {'centres' if mine else 'corners'}, torch {'corners' if mine else 'centres'}",
                    f"resize as align_corners={mine} does",
                    suspect.edited([op], "argument", index=2, value=not mine),
                )
        if op.name.startswith("upsample_nearest"):
            yield Variant(
                "Flax takes the nearest by the centres of pixels, torch by their lower corner",
                "take x[..., (jnp.arange(n) * size) // n]",
                suspect.edited([op], "nearest exact"),
            )


# ---------------------------------------------------------------- sums and precision


def summing(suspect: Suspect) -> Iterator[Variant]:
    """An operand of a sum or product left out, or taken twice, or a factor forgotten."""
    for op in suspect.operations:
        name = op.name.rstrip("_")
        if name in ("add", "sub") and len(op.shapes) == 2 and op.shapes[0] == op.shapes[1]:
            yield Variant("one term of a sum is not added", "add both", suspect.edited([op], "left out"))
            yield Variant("one term of a sum is not added", "add both", suspect.edited([op], "other operand"))
            for operand in (0, 1):
                yield Variant("one term of a sum is added twice", "add it once", suspect.edited([op], "twice", operand=operand))
        if name in ("mul", "div") and len(op.args) > 1 and isinstance(op.args[1], int | float):
            number = op.args[1]
            yield Variant(
                f"Flax does not {'multiply' if name == 'mul' else 'divide'} by {number:.6g}",
                f"{'multiply' if name == 'mul' else 'divide'} by {number:.6g}",
                suspect.edited([op], "left out"),
            )
            again = number if name == "mul" else 1 / number
            yield Variant(
                f"Flax {'multiplies' if name == 'mul' else 'divides'} by {number:.6g} twice",
                "do so once",
                suspect.edited([op], "scaled output", factor=again),
            )
            yield Variant(
                f"Flax {'divides' if name == 'mul' else 'multiplies'} by {number:.6g} instead",
                f"{'multiply' if name == 'mul' else 'divide'} by it",
                suspect.edited([op], "scaled output", factor=1 / again**2),
            )


PRECISE = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "softmax",
    "safe_softmax",
    "native_layer_norm",
    "convolution",
    "gelu",
    "exp",
    "mul",
    "add",
)


def precision(suspect: Suspect) -> Iterator[Variant]:
    """Part of the computation in a narrower dtype."""
    narrow = ("bfloat16", "float16", "float32")
    ops = [op for op in suspect.operations if op.name.rstrip("_").lstrip("_") in PRECISE]
    for dtype in narrow:
        yield from arguments_in(suspect, dtype)
        for where, chosen in groups(ops):
            for side in ("operands", "result") if chosen else ():
                name = f"{side} of {chosen[0].name.strip('_')}" if len(chosen) == 1 else f"{side} of every operation"
                yield Variant(
                    f"Flax computes in {dtype}: {name} are cut{where if len(chosen) > 1 else ''}",
                    f"leave out the cast to {dtype} (.astype, or dtype=)",
                    suspect.edited(chosen, "rounded", dtype=dtype, where=side),
                )


SIZES = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


def size_of_rounding(suspect: Suspect) -> Iterator[Variant]:
    """A difference that is as large as rounding in a narrower dtype makes it, wherever that happens."""
    expected, actual = suspect.trial.expected, suspect.trial.actual
    places = [p for p in suspect.differing if is_array(expected.get(p)) and is_array(actual.get(p))]
    if len(places) < len(suspect.differing):
        return
    sizes = [largest_gap(expected[p], actual[p]) / (finite_scale(expected[p]) or 1.0) for p in places]
    for dtype, unit in SIZES.items():
        if all(unit / 16 <= size <= unit * 4 for size in sizes):
            yield Variant(
                f"the difference is as large as rounding to {dtype} makes it: Flax computes something in {dtype}",
                f"leave out casts to {dtype} (.astype, dtype=, preferred_element_type=)",
                lambda: {p: expected[p] for p in places},
                unit=4 * unit,
            )


def arguments_in(suspect: Suspect, dtype: str) -> Iterator[Variant]:
    def cut(_: str, leaf: Any) -> Any:
        floating = is_array(leaf) and leaf.dtype.kind == "f"
        return leaf.astype(numpy_float(dtype)).astype(leaf.dtype) if floating else leaf

    one = suspect.trial.torch
    arrays = {p.path: p.torch for p in suspect.weights}
    weights = {path: cut("", array) for path, array in arrays.items()}
    new = {"args": mapped(cut, one.args), "kwargs": mapped(cut, dict(one.kwargs))}
    change = f"leave out dtype={dtype} and the cast"
    for index, array in enumerate(one.args):
        if is_array(array) and array.dtype.kind == "f":
            args = (*one.args[:index], cut("", array), *one.args[index + 1 :])
            yield Variant(f"Flax cuts args[{index}] to {dtype}", change, lambda a=args: suspect.again(args=a))
    yield Variant(f"Flax cuts its arguments to {dtype}", change, lambda: suspect.again(**new))
    if weights:
        yield Variant(f"Flax cuts its weights to {dtype}", change, lambda: suspect.again(weights=weights))
        yield Variant(f"Flax cuts arguments and weights to {dtype}", change, lambda: suspect.again(**new, weights=weights))
        yield Variant(
            f"Flax computes in {dtype}: arguments, weights and result are cut",
            change,
            lambda: {p: cut("", v) for p, v in suspect.again(**new, weights=weights).items()},
        )
    yield Variant(f"Flax cuts its result to {dtype}", change, lambda: {p: cut("", v) for p, v in suspect.again().items()})
