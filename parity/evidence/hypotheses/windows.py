"""Convolutions, pooling and resizing that see another border, or other places."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from parity.evidence.calls import Operation
from parity.evidence.hypotheses.suspect import Suspect, Variant
from parity.evidence.trial import is_array

Pads = tuple[tuple[int, int], ...]

MODES = {"constant": "zeros", "reflect": "reflect", "circular": "circular", "replicate": "replicate"}


def convolving(suspect: Suspect) -> Iterator[Variant]:
    """Padding at the other end, of another kind; another stride, dilation or grouping; a kernel that is not flipped."""
    for op in suspect.named("convolution"):
        transposed = op.args[6]
        yield from kernels(suspect, op)
        yield from grouped(suspect, op)
        yield from dealt_filters(suspect, op)
        if transposed:
            yield from moved_outputs(suspect, op)
        else:
            yield from padded_otherwise(suspect, op)
            yield from borders(suspect, op)
            yield from steps(suspect, op)


def kernels(suspect: Suspect, op: Operation) -> Iterator[Variant]:
    """The kernel laid otherwise."""
    shape, transposed, spatial = op.shapes[1], op.args[6], len(op.args[3])
    for change, what, told in (
        (
            {"flip": True},
            "the kernel is not turned round" if transposed else "the kernel is turned round",
            "turn the kernel round in space: transpose_kernel=True, or jnp.flip",
        ),
        ({"swap": True}, "the kernel has its last two axes exchanged", "kernel axes: (height, width, in, out)"),
        ({"channels": True}, "the kernel has inputs and outputs exchanged", "exchange the last two axes of Flax's kernel"),
    ):
        square = {"swap": shape[-1] == shape[-2] and spatial > 1, "channels": shape[0] == shape[1]}
        if all(square.get(key, True) for key in change):
            yield Variant(what, told, suspect.edited([op], "convolution", **change))


def grouped(suspect: Suspect, op: Operation) -> Iterator[Variant]:
    """Channels that are dealt out to the groups one by one, where each of torch's groups takes neighbours."""
    groups = op.args[8]
    if groups < 2:
        return
    for which, said in (("in", "the channels that it takes"), ("out", "those that it makes"), ("both", "all its channels")):
        yield Variant(
            f"{groups} groups: Flax deals {said} out to the groups one by one",
            f"let each group have neighbouring channels: feature_group_count={groups}, or reshape to ({groups}, -1)",
            suspect.edited([op], "convolution", groups=which),
        )


def dealt_filters(suspect: Suspect, op: Operation) -> Iterator[Variant]:
    """Several filters for each group, told apart by their number in it first: what one channel makes is no neighbour."""
    groups, filters = op.args[8], op.shapes[1][0]
    for count in (filters // groups, groups) if not op.args[6] and filters > groups > 1 else ():
        yield Variant(
            f"the {filters} filters of {groups} groups are in the order (number in the group, group)",
            f"order Flax's kernel and bias as (group, number in it), the {filters // groups} of each group side by side",
            suspect.edited([op], "convolution", filters=count),
        )


def moved_outputs(suspect: Suspect, op: Operation) -> Iterator[Variant]:
    """A transposed convolution of which another part is kept: other padding, or another size."""
    stride, padding, dilation = op.args[3:6]
    kernel, mine = op.shapes[1][2:], op.shape[2:]
    wide = [d * (k - 1) for k, d in zip(kernel, dilation)]
    pads = tuple((t - p, t - p + s) for t, p, s in zip(wide, padding, op.args[7]))
    told = f"set padding={pads}: k - 1 - p at both ends, and torch's output_padding behind"
    for size in sizes_of(suspect, mine):
        # Within a stride of torch's beginning, or none cut off, or as SAME cuts.
        steps = [range(max(p - s - 1, -t), p + s + 2) for p, s, t in zip(padding, stride, wide)]
        same = tuple(t - (t - (s - 1) + 2 * (s - 1) + 1) // 2 for t, s in zip(wide, stride))
        starts = [tuple(p + move for p in padding) for move in range(-2, 3)] + [(0,) * len(padding), same]
        every = itertools.product(*steps) if len(padding) < 3 else ()
        for start in dict.fromkeys([*starts, *every]):
            if start != tuple(padding) or size != mine:
                moved = tuple(a - p for a, p in zip(start, padding))
                shape = "" if size == mine else f", of size {size} for {mine}"
                yield Variant(
                    f"the output is moved by {moved}{shape}: other padding",
                    told,
                    suspect.edited([op], "convolution", starts=start, size=size),
                )


def sizes_of(suspect: Suspect, mine: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Torch's size in space, and that of what Flax has in its place, if it is another."""
    found = [tuple(mine)]
    for place in suspect.differing:
        a, b = suspect.trial.expected.get(place), suspect.trial.actual.get(place)
        if is_array(a) and is_array(b) and a.shape != b.shape and a.ndim == b.ndim and a.shape[2:] == tuple(mine):
            found.append(b.shape[2:])
    return list(dict.fromkeys(found))


def padded_otherwise(suspect: Suspect, op: Operation) -> Iterator[Variant]:
    """Other padding, of zeros or of another kind."""
    stride, padding, dilation = op.args[3:6]
    torchs = tuple((p, p) for p in padding)
    for pads in paddings(padding, op.shapes[1][2:], stride, dilation, op.shapes[0][2:]):
        yield Variant(
            f"Flax pads by {pads}, torch by {tuple(padding)} at both ends",
            f"set padding={torchs}",
            suspect.edited([op], "convolution", pads=pads),
        )
    for mode in ("reflect", "circular", "replicate") if any(padding) else ():
        yield Variant(
            f"Flax pads by {mode}, torch by zeros",
            "pad with zeros",
            suspect.edited([op], "convolution", pads=torchs, mode=mode),
        )


def borders(suspect: Suspect, op: Operation) -> Iterator[Variant]:
    """What torch pads before it convolves, padded with something else."""
    padding, dilation = op.args[4:6]
    kernel, size = op.shapes[1][2:], op.shapes[0][2:]
    wide = [d * (k - 1) for k, d in zip(kernel, dilation)]
    if any(padding) or not any(wide):
        return
    for pads in dict.fromkeys(
        (tuple((t // 2, t - t // 2) for t in wide), tuple((t, 0) for t in wide), tuple((t, t) for t in wide))
    ):
        if any(low + high >= length for (low, high), length in zip(pads, size)):
            continue
        for mode, words in MODES.items():
            yield Variant(
                f"Flax pads by {words} where torch pads otherwise",
                "pad as torch does: padding_mode of its layer, or F.pad before it; jnp.pad has mode='wrap', 'reflect', 'edge'",
                suspect.edited([op], "convolution", pads=pads, border=mode),
            )


def steps(suspect: Suspect, op: Operation) -> Iterator[Variant]:
    """Another dilation, another stride."""
    spatial = len(op.args[3])
    for index, name, setting in ((3, "stride", "strides"), (5, "dilation", "kernel_dilation")):
        mine = tuple(op.args[index])
        for other in dict.fromkeys((1, 2, 3, mine[0] + 1, mine[0] - 1)):
            new = (other,) * spatial
            if other > 0 and new != mine:
                for padding, said in widths(op, name, new):
                    yield Variant(
                        f"Flax has a {name} of {other}, torch of {mine}{said}",
                        f"set {setting}={mine}",
                        suspect.edited([op], "convolution", pads=padding, **{name: list(new)}),
                    )


def widths(op: Operation, name: str, new: tuple[int, ...]) -> Iterator[tuple[Pads, str]]:
    """Torch's padding, and what fits the new stride or dilation."""
    padding, kernel = op.args[4], op.shapes[1][2:]
    yield tuple((p, p) for p in padding), ""
    if name == "dilation":
        wide = [d * (k - 1) for k, d in zip(kernel, new)]
        yield tuple((t // 2, t - t // 2) for t in wide), ", with padding to fit"
        yield tuple((t, 0) for t in wide), ", with padding in front to fit"


# How operations pad, and how NumPy and jax call what else may be there.
PADS = {"constant_pad_nd": "constant"} | {f"reflection_pad{n}d": "reflect" for n in (1, 2, 3)}
PADS |= {f"replication_pad{n}d": "edge" for n in (1, 2, 3)}
BORDERS = ("constant", "reflect", "symmetric", "edge", "wrap")
VALUES = (0.0, 1.0, -1.0, float("-inf"))


def other_borders(suspect: Suspect) -> Iterator[Variant]:
    """The same number of elements put in front and behind, but others."""
    for op in suspect.operations:
        mine = PADS.get(op.name)
        if mine is None or not all(isinstance(side, int) and side >= 0 for side in op.args[1]):
            continue
        value = op.args[2] if mine == "constant" and len(op.args) > 2 and op.args[2] is not None else 0.0
        there = f"{value:g}" if mine == "constant" else repr(mine)
        for mode in BORDERS:
            for number in VALUES if mode == "constant" else (0.0,):
                if (mode, number) == (mine, value) or (mode == mine and mode != "constant"):
                    continue
                here = f"{number:g}" if mode == "constant" else repr(mode)
                yield Variant(
                    f"Flax pads with {here}, torch with {there} (in the words of jnp.pad)",
                    f"jnp.pad(x, ..., mode={mine!r}" + (f", constant_values={value:g})" if mine == "constant" else ")"),
                    suspect.edited([op], "padded as", pads=tuple(op.args[1]), mode=mode, value=number),
                )


def padding_in_code(suspect: Suspect) -> Iterator[Variant]:
    """What is padded by itself, padded with something else or at other ends."""
    yield from other_borders(suspect)
    for op in suspect.named("constant_pad_nd"):
        mine = tuple(op.args[1])
        ends = list(zip(mine[::2], mine[1::2]))
        others = [
            [(b, a) for a, b in ends],
            [((a + b) // 2, a + b - (a + b) // 2) for a, b in ends],
            [(a + b - (a + b) // 2, (a + b) // 2) for a, b in ends],
            [(a + b, 0) for a, b in ends],
            [(0, a + b) for a, b in ends],
            [(0, 0) for _ in ends],
            [(max(a - 1, 0), b + min(a, 1)) for a, b in ends],
            [(a + min(b, 1), max(b - 1, 0)) for a, b in ends],
            ends[::-1],
        ]
        for pads in dict.fromkeys(tuple(side for pair in other for side in pair) for other in others):
            if pads != mine:
                yield Variant(
                    f"Flax pads by {pads}, torch by {mine}, from the last axis on",
                    "give jnp.pad torch's numbers, (before, after) for each axis, the last axis last",
                    suspect.edited([op], "padded", pads=pads),
                )


def paddings(padding: Any, kernel: Any, stride: Any, dilation: Any, size: Sequence[int]) -> list[Pads]:
    """Other paddings of the same sum at both ends, SAME's and VALID's among them."""
    torchs = tuple((p, p) for p in padding)
    found = [tuple((0, 2 * p) for p in padding), tuple((2 * p, 0) for p in padding), tuple((0, 0) for _ in padding)]
    total = [d * (k - 1) for k, d in zip(kernel, dilation)]
    found += [tuple((t // 2, t - t // 2) for t in total), tuple((t - t // 2, t // 2) for t in total)]
    # SAME pads so much that the output has ceil(size / stride) elements, the rest behind.
    same = [max((-(-n // s) - 1) * s + t + 1 - n, 0) for n, t, s in zip(size, total, stride)]
    found += [tuple((t // 2, t - t // 2) for t in same), tuple((t - t // 2, t // 2) for t in same)]
    found += [tuple((t, 0) for t in total), tuple((0, t) for t in total)]
    found += [tuple((max(p - 1, 0), p + 1) for p in padding), tuple((p + 1, max(p - 1, 0)) for p in padding)]
    found += [tuple((max(p - 1, 0), p) for p in padding), tuple((p, max(p - 1, 0)) for p in padding)]
    found += [tuple((p + 1, p + 1) for p in padding)]
    return [pads for pads in dict.fromkeys(found) if pads != torchs]


# ---------------------------------------------------------------- pooling

POOLS = {f"{kind}_pool{n}d{end}": (way, n) for kind, way, end in (("avg", "mean", ""),) for n in (1, 2, 3)}
POOLS |= {f"max_pool{n}d{end}": ("largest", n) for n in (1, 2, 3) for end in ("", "_with_indices")}


def pooling(suspect: Suspect) -> Iterator[Variant]:
    """Padded zeros counted or not; padding of another kind or at the other end; the mean for the largest."""
    yield from adaptive(suspect)
    for op in suspect.operations:
        if op.name not in POOLS:
            continue
        way, spatial = POOLS[op.name]
        kernel = spread(op.args[1], spatial)
        stride = spread(op.args[2] if len(op.args) > 2 and op.args[2] else kernel, spatial)
        padding = spread(op.args[3] if len(op.args) > 3 else 0, spatial)
        counted = bool(op.args[5]) if way == "mean" and len(op.args) > 5 else True
        same = tuple((p, p) for p in padding)
        if way == "mean" and any(padding):
            yield Variant(
                f"an average counts padded zeros {'in torch' if counted else 'in Flax'} alone",
                f"pass count_include_pad={counted}",
                suspect.edited([op], "pool", way=way, pads=same, fill=0.0, count=not counted),
            )
        if way == "largest" and any(padding):
            yield Variant(
                "the largest of a window is sought among padded zeros too",
                "pad with -jnp.inf, as nnx.max_pool does with padding=((p, p), ...)",
                suspect.edited([op], "pool", way=way, pads=same, fill=0.0, count=True),
            )
        words = {"largest": "the largest", "mean": "the mean"}
        other = "mean" if way == "largest" else "largest"
        for count, fill in ((True, 0.0), (False, 0.0)) if other == "mean" else ((True, float("-inf")),):
            yield Variant(
                f"Flax takes {words[other]} of a window, torch {words[way]}",
                f"use nnx.{'max' if way == 'largest' else 'avg'}_pool",
                suspect.edited([op], "pool", way=other, pads=same, fill=fill, count=count),
            )
        yield from pool_settings(suspect, op, way)
        fill = float("-inf") if way == "largest" else 0.0
        shape = op.shapes[0][-spatial:]
        for pads in paddings(padding, kernel, stride, (1,) * spatial, shape):
            for count in (True, False) if way == "mean" and any(map(any, pads)) else (True,):
                said = "" if count else ", not counted"
                yield Variant(
                    f"Flax's window is padded by {pads}{said}, torch's by {padding} at both ends",
                    hanging(op, way) or f"set padding={same}" + (f", count_include_pad={counted}" if way == "mean" else ""),
                    suspect.edited([op], "pool", way=way, pads=pads, fill=fill, count=count),
                )


def adaptive(suspect: Suspect) -> Iterator[Variant]:
    """An adaptive pool, whose windows overlap where the size is no multiple, as a plain one of equal windows."""
    for op in suspect.named("adaptive_avg_pool2d"):
        have, make = op.shapes[0][-2:], op.shape[-2:]
        floor = [n // m for n, m in zip(have, make)]
        ceil = [-(-n // m) for n, m in zip(have, make)]
        rest = [n - (m - 1) * f for n, m, f in zip(have, make, floor)]
        for size, stride in dict.fromkeys(
            (tuple(a), tuple(b)) for a, b in ((floor, floor), (rest, floor), (ceil, floor), (ceil, ceil))
        ):
            yield Variant(
                f"Flax takes means of windows of {size} in steps of {stride}; torch's adaptive pool cuts {have} into {make}",
                "let window i reach from floor(i * n / m) to ceil((i + 1) * n / m), as torch's do",
                suspect.edited([op], "windows", size=size, stride=stride),
            )


# Where the settings of a pool stand that Flax's have no word for, and what they are without one.
CEIL = {"mean": 4, "largest": 5}


def hanging(op: Operation, way: str) -> str:
    """What to do where torch's last window hangs over the edge; '' where none does."""
    if not (len(op.args) > CEIL[way] and op.args[CEIL[way]] is True):
        return ""
    rest = "take the mean of what is in the window alone" if way == "mean" else "pad behind with -jnp.inf"
    return f"torch has ceil_mode=True, for which Flax has no word: let the last window hang over the edge, and {rest}"


def pool_settings(suspect: Suspect, op: Operation, way: str) -> Iterator[Variant]:
    """Windows over the edge, spread windows, and another divisor, none of which Flax's pools have."""
    if hanging(op, way):
        edit = suspect.edited([op], "argument", index=CEIL[way], value=False)
        yield Variant("the window that hangs over the edge is left out: ceil_mode=True in torch", hanging(op, way), edit)
    dilation = op.args[4] if way == "largest" and len(op.args) > 4 else 1
    if any(step != 1 for step in (dilation if isinstance(dilation, tuple) else (dilation,))):
        edit = suspect.edited([op], "argument", index=4, value=[1] * (len(op.args[1])))
        yield Variant(
            f"the window is not spread: dilation={dilation} in torch", "use jax.lax.reduce_window with window_dilation", edit
        )
    if way == "mean" and len(op.args) > 6 and op.args[6]:
        edit = suspect.edited([op], "argument", index=6, value=None)
        yield Variant(
            f"the mean is taken where torch divides by {op.args[6]}", f"divide the sum of a window by {op.args[6]}", edit
        )


def spread(value: Any, spatial: int) -> tuple[int, ...]:
    """One number for each axis in space."""
    numbers = tuple(value) if isinstance(value, tuple | list) else (value,)
    return numbers if len(numbers) == spatial else numbers[:1] * spatial


# ---------------------------------------------------------------- resizing

# What each operation computes, by the mode of torch.nn.functional.interpolate.
RESIZES = {"nearest": "nearest", "nearest_exact": "nearest-exact", "linear": "linear", "bilinear": "bilinear"}
RESIZES |= {"bicubic": "bicubic", "trilinear": "trilinear"}


def resizing(suspect: Suspect) -> Iterator[Variant]:
    """Corners lined up or not; another neighbour, another kernel, digits smoothed before they are dropped."""
    for op in suspect.operations:
        name = op.name.removeprefix("upsample_").removeprefix("_upsample_").rstrip("_")
        kind, spatial = name.rstrip("123d").rstrip("_"), len(op.shapes[0]) - 2 if op.shapes else 0
        if "upsample" not in op.name or kind not in RESIZES:
            continue
        mine, corners = RESIZES[kind], op.args[2] if len(op.args) > 2 and isinstance(op.args[2], bool) else None
        if corners is not None:
            yield Variant(
                f"Flax lines up {'centres' if corners else 'corners'}, torch {'corners' if corners else 'centres'}",
                f"resize as align_corners={corners} does",
                suspect.edited([op], "argument", index=2, value=not corners),
            )
        if "nearest" in mine and op.shape[2:] != op.shapes[0][2:]:
            yield Variant(
                "Flax repeats the whole one after the other, as jnp.tile does, where torch repeats each element beside itself",
                "jnp.repeat(x, factor, axis) for each axis in space",
                suspect.edited([op], "tiled"),
            )
        if mine == "nearest":
            yield Variant(
                "Flax takes the nearest by the centres of pixels, torch by their lower corner",
                "take x[..., (jnp.arange(n) * size) // n]",
                suspect.edited([op], "nearest exact"),
            )
        if mine in ("bilinear", "bicubic"):
            lines_up = "; and Flax lines up centres, torch corners" if corners else ""
            yield Variant(
                (
                    "Flax smooths before it resizes, torch does not"
                    if mine == "bilinear"
                    else "Flax's cubic kernel has a = -0.5 and smooths what gets smaller, torch's a = -0.75 and does not"
                )
                + lines_up,
                "resize as align_corners=True does, which jax.image.resize cannot"
                if corners
                else "pass antialias=False to jax.image.resize"
                if mine == "bilinear"
                else "write torch's kernel out: jax.image.resize has no such constant",
                suspect.edited([op], "resized", mode=mine, antialias=True, corners=False),
            )
        line = {1: "linear", 2: "bilinear", 3: "trilinear"}.get(spatial, "")
        for other in ("nearest", "nearest-exact", line, *(("bicubic",) if spatial == 2 else ())):
            if other and other != mine:
                ways = (False, True) if other in ("bilinear", "bicubic") else (False,)
                for smooth, edge in itertools.product(ways, (None,) if "nearest" in other else (False, True)):
                    if smooth and edge:
                        continue
                    yield Variant(
                        f"Flax resizes by {other}, torch by {mine}",
                        f"resize as mode={mine!r} does",
                        suspect.edited([op], "resized", mode=other, antialias=smooth, corners=edge),
                    )


def shuffling(suspect: Suspect) -> Iterator[Variant]:
    """Channels made into pixels in another order."""
    for op in suspect.named("pixel_shuffle"):
        yield Variant(
            "Flax reads the channels of a pixel shuffle as (row, column, channel), torch as (channel, row, column)",
            "reshape the channels to (channel, row, column), as torch.nn.PixelShuffle does",
            suspect.edited([op], "depth major"),
        )
    for op in suspect.named("pixel_unshuffle"):
        yield Variant(
            "Flax makes the channels of a pixel unshuffle as (row, column, channel), torch as (channel, row, column)",
            "put the channels in front of row and column before they are joined, as torch.nn.PixelUnshuffle does",
            suspect.edited([op], "blocks of channels", axis=1, count=op.args[1] ** 2),
        )
    for op in suspect.named("im2col"):
        yield Variant(
            "Flax lays out unfolded windows as (row, column, channel), torch as (channel, row, column)",
            "put the channels in front of row and column, as torch.nn.Unfold does",
            suspect.edited([op], "blocks of channels", axis=1, count=op.args[1][0] * op.args[1][1]),
        )
