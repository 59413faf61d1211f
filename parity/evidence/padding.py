"""Padded places of outputs: compared outside of them, told inside."""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from parity.errors import InputError, listed
from parity.evidence.calls import Captured, Evaluation
from parity.evidence.notes import Note
from parity.evidence.numerics import finite_scale, same_bits, same_specials, wide

Key = TypeVar("Key", bound=Hashable)


class Padding:
    """Which places of outputs are padding.

    A mask belongs to every output whose shape begins with the mask's; a mapping gives each
    output path a mask of its own, of that output's first axes or of ones in their place.

    Args:
        given: a bool array, True hides; or a mapping from output paths to such arrays; None hides nothing.

    Raises:
        InputError: a mask is no bool array, or hides everything.
    """

    def __init__(self, given: Any):
        self.masks: Mapping[Hashable, np.ndarray] | np.ndarray | None = None
        if given is None:
            return
        several = isinstance(given, Mapping)
        masks: dict[Hashable, np.ndarray] = {k: np.asarray(m) for k, m in (given if several else {"": given}).items()}
        problems = []
        for path, mask in masks.items():
            name = f"padding_mask[{path!r}]" if several else "padding_mask"
            if mask.dtype != bool:
                problems.append(f"{name} must be bool, True where a place is padding, got {mask.dtype}; cast it, or invert it")
            elif not mask.ndim or mask.all():
                problems.append(f"{name} of shape {mask.shape} hides everything; at least one place must be left to compare")
        if problems or not masks:
            raise InputError(listed("cannot compare", problems or ["padding_mask is an empty mapping; leave it out"]))
        self.masks = masks if several else masks[""]

    def __bool__(self) -> bool:
        return self.masks is not None

    def hidden(self, path: Hashable, shape: tuple[int, ...]) -> np.ndarray | None:
        """Which places of an output are padding, in its shape; None if no mask belongs to it."""
        mask = self.masks.get(path) if isinstance(self.masks, Mapping) else self.masks
        if mask is None or len(shape) < mask.ndim:
            return None
        front = shape[: mask.ndim]
        # One mask for all outputs is told by its shape, so there a 1 must not fit anything.
        if mask.shape != front and not (isinstance(self.masks, Mapping) and fits(mask.shape, front)):
            return None
        return np.broadcast_to(mask.reshape(mask.shape + (1,) * (len(shape) - mask.ndim)), shape)

    def check(self, run: Evaluation) -> None:
        """Refuse a mask that belongs to no output.

        Raises:
            InputError: there is one.
        """
        if self.masks is None:
            return
        shapes = {path: array.shape for path, array in run.outputs.items() if isinstance(array, np.ndarray)}
        told = ", ".join(f"{path or 'the output'} {shape}" for path, shape in shapes.items()) or "none is an array"
        if isinstance(self.masks, Mapping):
            wrong = [
                f"padding_mask[{path!r}] of shape {mask.shape} fits no output of that name; the outputs are {told}"
                for path, mask in self.masks.items()
                if path not in shapes or self.hidden(path, shapes[path]) is None
            ]
        else:
            fitting = any(self.hidden(path, shape) is not None for path, shape in shapes.items())
            wrong = (
                []
                if fitting
                else [
                    f"padding_mask of shape {self.masks.shape} fits no output; it must have the first axes of one. The outputs "
                    f"are {told}; a mapping from paths to masks says which output has which"
                ]
            )
        if wrong:
            raise InputError(listed("cannot compare", wrong))

    def blank(self, outputs: dict[Key, Any]) -> dict[Key, Any]:
        """Outputs with zeros in the place of padding, so that nothing there is compared."""
        if self.masks is None:
            return outputs
        found: dict[Key, Any] = {}
        for path, array in outputs.items():
            hidden = self.hidden(path, array.shape) if isinstance(array, np.ndarray) else None
            found[path] = array if hidden is None else np.where(hidden, np.zeros((), array.dtype), array)
        return found

    def seen(self, run: Evaluation) -> Evaluation:
        """A run as it is compared."""
        return replace(run, outputs=self.blank(run.outputs)) if self else run

    def modules(self, records: list[Captured]) -> list[Captured]:
        """What modules returned as it is compared: what begins with the mask's shape is padded like an output.

        Masks that are given by the model's own outputs say nothing of those of other modules.
        """
        whole = not isinstance(self.masks, Mapping)
        return [replace(r, outputs=self.blank(r.outputs)) if self and (whole or not r.path) else r for r in records]

    def parts(self, path: str, shape: tuple[int, ...], parts: list[Any]) -> list[Any]:
        """Those of the parts of an output that lie outside of padding."""
        hidden = self.hidden(path, shape) if self else None
        return parts if hidden is None else [~hidden if part is ... else part & ~hidden for part in parts]

    def notes(self, expected: Evaluation, actual: Evaluation | None) -> tuple[Note, ...]:
        """What was left out of the comparison, and whether it differs there."""
        if not self:
            return ()
        shapes = {path: array.shape for path, array in expected.outputs.items() if isinstance(array, np.ndarray)}
        hidden = {path: mask for path, shape in shapes.items() if (mask := self.hidden(path, shape)) is not None}
        places = {path or "the output": f"{int(mask.sum())} of {mask.size}" for path, mask in hidden.items()}
        text = "compared outside the padding mask, which leaves out " + ", ".join(
            f"{count} values of {path}" for path, count in places.items()
        )
        whole = [path for path in shapes if path not in hidden]
        text += f"; compared whole: {', '.join(whole)}" if whole else ""
        found = [Note("padding-mask", "", text, {path: int(mask.sum()) for path, mask in hidden.items()})]
        theirs_by_path = actual.outputs if actual else {}
        for path, mask in hidden.items():
            theirs, mine = theirs_by_path.get(path), expected.outputs[path]
            if isinstance(theirs, np.ndarray) and theirs.shape == mine.shape:
                found += differing(path, wide(mine)[mask], wide(theirs)[mask])
        return tuple(found)


# No output is padded.
NOWHERE = Padding(None)


def fits(mask: tuple[int, ...], front: tuple[int, ...]) -> bool:
    return all(a in (1, b) for a, b in zip(mask, front, strict=True))


def differing(path: str, mine: np.ndarray, theirs: np.ndarray) -> list[Note]:
    """What is told of padded places of an output at which the two sides differ by more than float32 resolves."""
    special = same_specials(theirs, mine)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.nan_to_num(np.abs(theirs - mine), nan=0.0, posinf=0.0)
    wrong = ~special | (gap > 2.0**-20 * max(finite_scale(mine), 1.0)) & ~same_bits(mine, theirs)
    if not wrong.any():
        return []
    text = f"differs at {int(wrong.sum())} of {wrong.size} values inside the padding mask"
    text += f", by at most {gap.max():.3g}" if gap.any() else ""
    text += f", NaN or infinity on one side only at {int((~special).sum())}" if not special.all() else ""
    figures = {"differing": int(wrong.sum()), "elements": wrong.size, "difference": float(gap.max(initial=0.0))}
    return [Note("padding-differs", f"output {path}" if path else "the output", f"{text}: not counted", figures)]
