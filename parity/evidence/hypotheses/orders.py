"""Axes, heads and pieces in another order."""

import itertools
from collections.abc import Iterator
from typing import Any

from parity.evidence.calls import Operation, fingerprint
from parity.evidence.hypotheses.suspect import Suspect, Variant, groups
from parity.evidence.trees import flatten
from parity.evidence.trial import is_array


def softmax_axis(suspect: Suspect) -> Iterator[Variant]:
    """Softmax, a mean or a sum over another axis."""
    yield from summed_axes(suspect)
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


# Where the axes of a summary stand that may run over several.
OVER = {"linalg_vector_norm": 2, "mean": 1, "sum": 1, "amax": 1, "amin": 1, "var": 1, "std": 1, "var_mean": 1, "logsumexp": 1}
MOST_SUMMED = 4


def summed_axes(suspect: Suspect) -> Iterator[Variant]:
    """A length, a mean or a variance over other axes, fewer or more, as of a norm over channels for one over positions."""
    for op in suspect.named(*OVER):
        dims = op.args[OVER[op.name]] if len(op.args) > OVER[op.name] else None
        if not isinstance(dims, tuple) or not op.shapes or len(op.shapes[0]) > MOST_SUMMED:
            continue
        mine, ndim = tuple(sorted(dim % len(op.shapes[0]) for dim in dims)), len(op.shapes[0])
        for count in range(1, ndim + 1):
            for axes in itertools.combinations(range(ndim), count):
                # Of those that run over one axis most are told above.
                if axes != mine and ((count, len(mine)) != (1, 1) or op.name == "linalg_vector_norm"):
                    yield Variant(
                        f"{op.name} runs over the axes {axes} in Flax and {mine} in torch",
                        f"pass axis={mine}",
                        suspect.edited([op], "argument", index=OVER[op.name], value=list(axes)),
                    )


SUMMARIES = {"mean": "mean", "sum": "sum", "amax": "largest", "max": "largest", "amin": "smallest", "min": "smallest"}


def summaries(suspect: Suspect) -> Iterator[Variant]:
    """A mean where torch takes the largest, the first position where it takes the last, and so on, along the same axis."""
    for op in suspect.named(*SUMMARIES, "select"):
        if len(op.args) < 2 or not op.shapes or (op.name == "select" and len(op.args) < 3):
            continue
        dims = tuple(op.args[1]) if isinstance(op.args[1], tuple | list) else (op.args[1],)
        if not dims or not all(isinstance(dim, int) for dim in dims):
            continue
        shape, mine = op.shapes[0], SUMMARIES.get(op.name, f"position {op.args[2]}" if op.name == "select" else "")
        for other in dict.fromkeys(SUMMARIES.values()):
            if other != mine:
                yield Variant(
                    f"Flax takes the {other} along axis {dims} where torch takes the {mine}",
                    f"take the {mine}",
                    suspect.edited([op], "summary", dims=dims, to=other),
                )
        last = shape[dims[0]] - 1
        for position in dict.fromkeys((0, last, 1, last - 1)) if len(dims) == 1 else ():
            if not (op.name == "select" and op.args[2] % shape[dims[0]] == position):
                yield Variant(
                    f"Flax takes position {position} along axis {dims[0]} where torch takes the {mine}",
                    f"take the {mine}",
                    suspect.edited([op], "summary", dims=dims, to="position", position=position),
                )


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
            if chosen and axis is not None and not (edit == "joined minor" and in_space(suspect, chosen[0])):
                edited = suspect.edited(chosen, edit, axis=axis)
                count = repeats(suspect, chosen[0], axis) if edit == "joined minor" else 0
                if count:
                    what = f"heads are repeated as jnp.tile does, one after the other, torch's each beside itself{where}"
                    yield Variant(what, f"jnp.repeat(x, {count}, axis={axis})", edited)
                    continue
                yield Variant(
                    f"heads are {word} in the order (width, heads){where}",
                    f"{word.removesuffix('d')} as (heads, width)",
                    edited,
                )


def repeats(suspect: Suspect, op: Operation, axis: int) -> int:
    """How often each head was repeated along the second of two axes before they are joined; 0 if it was not."""
    before = suspect.operations[: op.number]
    count = op.shapes[0][axis + 1]
    for one in reversed(before):
        if one.shape != op.shapes[0] or not one.shapes:
            return 0
        if one.name == "expand":
            return count if one.shapes[0][-len(one.shape) + axis + 1] == 1 else 0
        if one.name not in ("clone", "contiguous"):
            return 0
    return 0


# Axes of one transposition beyond which not every order of them is tried.
MOST_AXES = 6


def permuted(suspect: Suspect) -> Iterator[Variant]:
    """Axes that a transposition puts into another order, as where patches or windows are cut out of an image."""
    for op in suspect.named("permute"):
        mine = tuple(dim % len(op.shape) for dim in op.args[1])
        if not 3 <= len(mine) <= MOST_AXES:
            continue
        # The batch stays where it is.
        kept = 1 if mine[0] == 0 else 0
        for rest in itertools.permutations(mine[kept:]):
            order = (*mine[:kept], *rest)
            if order != mine:
                yield Variant(
                    f"Flax has the axes of {op.shapes[0]} in the order {order}, torch in the order {mine}",
                    f"x.transpose{mine}",
                    suspect.edited([op], "permuted", order=order),
                )


def rolled(suspect: Suspect) -> Iterator[Variant]:
    """A cyclic shift, as of windows, in the other direction or left out."""
    for where, chosen in groups(suspect.named("roll")):
        for edit, said in (("rolled back", "the other way round"), ("left out", "not at all")) if chosen else ():
            yield Variant(
                f"Flax rolls {said} where torch rolls by {chosen[0].args[1]}{where}",
                f"jnp.roll(x, {chosen[0].args[1]}, axis={chosen[0].args[2] if len(chosen[0].args) > 2 else None})",
                suspect.edited(chosen, edit),
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


def in_space(suspect: Suspect, op: Operation) -> bool:
    """Whether an operation takes what a layer over images returns: its last axes are height and width."""
    found = {
        fingerprint(array)
        for key in suspect.isolator.children.get(suspect.trial.torch.key, ())
        if any(word in suspect.isolator.torch_layers[key[0]].kinds[0] for word in ("Conv", "Pool", "BatchNorm", "Upsample"))
        for _, array in flatten(suspect.isolator.calls[key].output, is_array)
        if is_array(array)
    }
    return any(number in found for number in op.operands.values())


def columns_first(suspect: Suspect) -> Iterator[Variant]:
    """Height and width of an image laid in one row column by column."""
    for op in suspect.operations:
        if op.name in ("view", "_unsafe_view", "unsafe_view") and op.shapes and in_space(suspect, op):
            axis = split_axis(op.shape, op.shapes[0])
            if axis is not None:
                yield Variant(
                    f"Flax lays axes {axis} and {axis + 1} of {op.shapes[0]} in one row column by column, torch row by row",
                    "reshape without exchanging height and width before",
                    suspect.edited([op], "joined minor", axis=axis),
                )


def flattened(suspect: Suspect) -> Iterator[Variant]:
    """Channels first or last before all is laid in one row; height and width exchanged before."""
    yield from columns_first(suspect)
    views = [op for op in suspect.operations if op.name in ("view", "_unsafe_view") and op.shapes and len(op.shapes[0]) > 2]
    for where, chosen in groups(op for op in views if len(op.shape) < len(op.shapes[0])):
        if chosen:
            yield Variant(
                f"Flax lays {chosen[0].shapes[0]} in one row with the channels last{where}",
                "move the channels to the front first, x.transpose(0, 3, 1, 2).reshape(n, -1), or reorder the kernel's rows",
                suspect.edited(chosen, "channels last first"),
            )


# Pairs of slices that are tried.
MOST_SLICES = 24


def pieces(suspect: Suspect) -> Iterator[Variant]:
    """The pieces of a split (q, k, v; gate and value), or of what is put together, in another order."""
    yield from joined_pieces(suspect)
    for op in suspect.named("glu"):
        yield Variant(
            "the first half of a gated linear unit is taken for the gate",
            "value * sigmoid(gate), where the value is the first half",
            suspect.edited([op], "gated", value="identity", gate="sigmoid", exchanged=True),
        )
    yield from exchanged_slices(suspect)
    yield from shifted_slices(suspect)
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


def exchanged_slices(suspect: Suspect) -> Iterator[Variant]:
    """Two slices of one value, such as `x[..., :n]` and `x[..., n:]`, each in the place of the other."""
    slices = [op for op in suspect.named("slice") if len(op.args) > 3 and (0,) in op.operands and op.shape != op.shapes[0]]
    for one, other in list(itertools.combinations(slices, 2))[:MOST_SLICES]:
        same = (one.operands, one.args[1], one.shape) == (other.operands, other.args[1], other.shape)
        if same and one.args[2:4] != other.args[2:4]:
            ends = [{"start": op.args[2] or 0, "end": op.args[3]} for op in (other, one)]
            edits = [(op, "moved slice", place) for op, place in zip((one, other), ends, strict=True)]
            yield Variant(
                f"two slices of {one.shapes[0]}, from {ends[1]['start']} and from {ends[0]['start']} on, are exchanged",
                "take them in torch's order",
                suspect.edited_each(edits),
            )


def shifted_slices(suspect: Suspect) -> Iterator[Variant]:
    """The first places of one value beside the last of another, as of words and the next, the other way round."""
    cut = [(op, edge) for op in suspect.named("slice") if op.shapes and (edge := edge_of(op))]
    for (one, here), (other, there) in list(itertools.combinations(cut, 2))[:MOST_SLICES]:
        (steps, side, size), (others, beside, length) = here, there
        if steps != others or side == beside or one.operands == other.operands:
            continue
        starts = {"front": steps, "back": 0}
        edits = [
            (op, "moved slice", {"start": starts[end], "end": starts[end] + long})
            for op, end, long in ((one, side, size), (other, beside, length))
        ]
        yield Variant(
            f"of two values that are cut by {steps}, {one.shapes[0]} and {other.shapes[0]}, each is cut at the other end",
            "cut them at torch's ends: what is told at a place belongs beside the next id",
            suspect.edited_each(edits),
        )


def edge_of(op: Operation) -> tuple[int, str, int] | None:
    """By how much a slice cuts off one end, at which end what is left stands, and how long that is; None for others."""
    size = op.shapes[0][op.args[1]] if len(op.args) > 3 else 0
    if not size or not isinstance(op.args[3], int):
        return None
    start, end = op.args[2] or 0, min(op.args[3] if op.args[3] >= 0 else size + op.args[3], size)
    if (start == 0) == (end == size) or start < 0:
        return None
    return (size - end, "front", end) if start == 0 else (start, "back", size - start)


def joined_pieces(suspect: Suspect) -> Iterator[Variant]:
    """What is put together (a skip connection, both directions, a class token) in another order."""
    for op in suspect.named("cat", "stack", "concat"):
        count = len([path for path in op.operands if len(path) == 2])
        for order in itertools.permutations(range(count)) if 1 < count <= 4 else ():
            if order != tuple(range(count)):
                yield Variant(
                    f"{count} pieces are put together in the order {order}",
                    "put them together in torch's order",
                    suspect.edited([op], "joined", order=order),
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
