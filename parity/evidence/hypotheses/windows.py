"""Convolutions, pooling and resizing that see another border."""

import itertools
from collections.abc import Iterator
from typing import Any

from parity.evidence.hypotheses.suspect import Suspect, Variant


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
