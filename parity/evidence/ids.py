"""Whole numbers that name rows of a table: how many rows there are, and numbers beyond them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from parity.errors import InputError, listed, raised
from parity.evidence.calls import Call
from parity.evidence.subject import Subject, arrays_of
from parity.evidence.trees import mapped


def id_arguments(call: Call) -> list[tuple[str, np.ndarray]]:
    """Arguments that may name rows: arrays of whole numbers."""
    return [(path, array) for path, array in arrays_of(call) if array.dtype.kind in "iu" and array.size]


def check_ids(subject: Subject) -> frozenset[str]:
    """Refuse ids beyond their table: torch raises there, jax takes another row or NaN in silence.

    Returns:
        The paths of the arguments that are looked up in a table.

    Raises:
        InputError: an argument holds such ids.
    """
    given = id_arguments(subject.call)
    if not given:
        return frozenset()
    try:
        found, failed = subject.torch.lookups(subject.torch_model, subject.call)
    except Exception:
        # What raises here raises again where it is reported.
        return frozenset()
    used = {path for path, array in given for one in found if same_numbers(array, one.ids)}
    if failed:
        last = found[-1]
        wrong = [path for path, array in given if same_numbers(array, last.ids)]
        if wrong:
            raise InputError(
                f"{wrong[0]} holds ids from {last.ids.min()} to {last.ids.max()}, and {last.table or 'the table'} of the torch "
                f"model has rows 0 to {last.rows - 1}: torch raises there, jax takes another row or NaN in silence; give ids "
                f"below {last.rows}",
                "ids out of range",
            )
    return frozenset(used)


def same_numbers(array: np.ndarray, ids: np.ndarray) -> bool:
    return array.size == ids.size and np.array_equal(array.ravel(), ids.ravel())


def vocabularies(room: Any, model: Any, call: Call, paths: Sequence[str]) -> dict[str, int]:
    """How many ids each of these arguments may hold, from the tables that the torch model looks them up in.

    Args:
        room: torch's.
        model: a `torch.nn.Module`.
        call: arguments of the right shapes; ids may be any.
        paths: of the arguments.

    Raises:
        InputError: an argument is looked up nowhere, or the model does not run; all of them at once.
    """
    zeros = with_ids(call, dict.fromkeys(paths, 0))
    problems, found = [], {}
    try:
        plain, _ = room.lookups(model, zeros)
        for path in paths:
            moved, _ = room.lookups(model, with_ids(zeros, {path: 1}))
            rows = [rows_for(one.ids, other.ids, one.rows) for one, other in zip(plain, moved, strict=False)]
            known = [count for count in rows if count is not None]
            if known:
                found[path] = min(known)
            else:
                problems.append(
                    f"the model looks up {path} in no table; state its vocabulary: parity.Ids(shape, vocabulary=...)"
                )
    except InputError:
        raise
    except Exception as error:
        problems.append(f"the model does not run on these shapes: {raised(error)}; state the vocabulary in parity.Ids")
    if problems:
        raise InputError(listed("cannot make inputs", problems))
    return found


def rows_for(zeros: np.ndarray, ones: np.ndarray, rows: int) -> int | None:
    """How many ids a look-up leaves room for, if it moves by one with them; None if it does not hang on them."""
    if zeros.shape != ones.shape or not zeros.size or not (ones.astype(np.int64) - zeros == 1).all():
        return None
    return rows - int(zeros.max())


def with_ids(call: Call, values: dict[str, int]) -> Call:
    """The call with arguments filled with one id each."""

    def filled(path: str, value: Any) -> Any:
        return np.full_like(value, values[path]) if path in values else value

    return replace(call, args=mapped(filled, call.args, "args"), kwargs=mapped(filled, dict(call.kwargs), "kwargs"))
