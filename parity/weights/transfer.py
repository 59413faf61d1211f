"""Copy parameters between models and trees of both frameworks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from parity.errors import InputError, TransferError, listed
from parity.weights.layouts import Layout
from parity.weights.leaf import gathered
from parity.weights.pairing import Pair, Pairing, pair


@dataclass(frozen=True)
class Entry:
    """How one leaf travelled.

    Attributes:
        source: its path in the source.
        target: its path in the target.
        layout: from the source's layout to the target's.
        shape: in the target.
        dtype: in the source.
        target_dtype: in the target, after the transfer.
        bytes: in the target.
        decided_by: `rule` for a row of the ledger, `name` where no layer was known.
        shared: whether source and target now use the same memory.
    """

    source: str
    target: str
    layout: str
    shape: tuple[int, ...]
    dtype: str
    target_dtype: str
    bytes: int
    decided_by: str
    shared: bool


@dataclass(frozen=True)
class Transfer:
    """What a transfer did.

    Attributes:
        value: the filled module, or the new tree.
        plan: one entry for each pair of leaves, in the source's order.
        ignored: paths left out because the caller said so.
        random: paths of random state, which never travels.
        ties: groups of source names that are one array.
        lost_ties: ties that only one side has; one sentence each.
        settings: settings of layers that do not agree, such as an epsilon; one sentence each.
        alone: arrays that have no counterpart by their nature, such as torch's count of batches, and
            what differs although weights and settings agree; one sentence each.
    """

    value: Any
    plan: tuple[Entry, ...]
    ignored: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    lost_ties: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the two models now have the same parameters, ties and settings."""
        return not self.settings and not self.lost_ties

    def __str__(self) -> str:
        from parity.report.text import transfer_text

        return transfer_text(self)

    def to_dict(self) -> dict[str, Any]:
        """The result for machines; the value itself is left out."""
        from parity.report.data import as_data

        return as_data(self, leave_out=("value",))


def transfer(
    source: Any,
    target: Any,
    *,
    rename: Mapping[str, str] | None = None,
    ignore: Iterable[str] = (),
    cast: str | None = None,
    copy: bool = True,
) -> Transfer:
    """Copy every parameter and buffer of `source` to its counterpart in `target`, bit for bit.

    Strict: every leaf of both sides must have a counterpart, unless it is ignored. All
    problems come in one error, and then nothing has been written.

    Args:
        source: a `torch.nn.Module`, a `state_dict`, an `nnx.Module` or an `nnx.State`. Never changed.
        target: likewise. A module is filled in place; a tree only gives names, shapes and
            dtypes, and a new one is returned in `Transfer.value`.
        rename: names on the torch side to names on the Flax side, of leaves or of modules; used
            in either direction of travel. `{i}` stands for a number that both sides share.
            Between two of one framework: names of the source to names of the target.
        ignore: patterns (`*` stands for anything) of leaves on either side to leave out.
        cast: None wants equal dtypes; "target" rounds to the target's dtype, "source" gives the
            target the source's dtype, any dtype's name casts to that on arrival.
        copy: False lets both sides use the same memory where the framework can; a later write on
            one side is then seen on the other. Each entry of the plan says whether it is shared.

    Returns:
        What was done, leaf by leaf.

    Raises:
        InputError: source or target is neither a model nor a tree, or `cast` is no dtype.
        TransferError: leaves without counterpart or values, shapes or dtypes that do not fit.
        MissingFrameworkError: a framework that is needed is not installed.
    """
    ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    pairing = pair(source, target, rename=rename, ignore=ignore)
    dtypes = {p.target.path: wanted_dtype(p, cast) for p in pairing.pairs}
    problems = pairing.problems + dtype_problems(pairing, cast)
    problems += tuple(f"{p.source.path} {p.source.unreadable}" for p in pairing.pairs if p.source.unreadable)
    problems += tuple(pairing.target.refusals(target, {p.target.array_path: dtypes[p.target.path] for p in pairing.pairs}))
    if not pairing.pairs and not problems:
        problems = ("neither side has parameters that could travel",)
    if problems:
        raise TransferError(listed("transfer refused, nothing was written", problems), problems)
    arrays = {p.target.path: travelled(p, dtypes[p.target.path], copy) for p in pairing.pairs}
    lost = [overflow(p, arrays[p.target.path]) for p in pairing.pairs if dtypes[p.target.path] != p.source.dtype]
    if any(lost):
        raise TransferError(listed("transfer refused, nothing was written", [s for s in lost if s]), [s for s in lost if s])
    zeros = {leaf.path: np.zeros(leaf.shape, numpy_dtype(leaf.dtype)) for leaf in pairing.zeros}
    whole = gathered([(p.target, arrays[p.target.path]) for p in pairing.pairs]) | zeros
    value, done = pairing.target.fill(target, whole)
    return Transfer(
        value,
        tuple(entry(p, dtypes[p.target.path], p.target.path in done) for p in pairing.pairs),
        pairing.ignored,
        pairing.random,
        pairing.ties,
        pairing.lost_ties,
        pairing.settings,
        pairing.alone,
    )


def wanted_dtype(p: Pair, cast: str | None) -> str:
    """The dtype of a leaf on arrival. What is no float keeps its own, unless it is to take on the target's."""
    if cast in (None, "source") or kind(p.source.dtype) != kind(p.target.dtype):
        return p.source.dtype
    return p.target.dtype if cast == "target" else cast if is_float(p.source.dtype) else p.source.dtype


def dtype_problems(pairing: Pairing, cast: str | None) -> tuple[str, ...]:
    if cast not in (None, "target", "source") and not is_float(str(cast)):
        raise InputError(f'cast must be None, "target", "source" or the name of a floating point dtype, got {cast!r}')
    return tuple(
        f"{p.source.path} is {p.source.dtype} and {p.target.path} {p.target.dtype}; "
        + (
            'pass cast="target" to round, or cast="source" to let the target take on the source\'s dtype'
            if kind(p.source.dtype) == kind(p.target.dtype)
            else "no cast leads from one to the other; give both the same kind of dtype"
        )
        for p in pairing.pairs
        if p.source.dtype != p.target.dtype and (cast is None or kind(p.source.dtype) != kind(p.target.dtype))
    )


# Those that both frameworks have.
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def is_float(dtype: str) -> bool:
    return dtype in FLOATS


def kind(dtype: str) -> str:
    """`float` for any floating point dtype, `int` for any integer one, otherwise the dtype itself."""
    return next((name for name in ("float", "complex", "int") if name in dtype), dtype)


def numpy_dtype(dtype: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, dtype) if hasattr(ml_dtypes, dtype) else dtype)


def travelled(p: Pair, dtype: str, copy: bool) -> Any:
    """The array as it arrives: a view in NumPy, or a sharing object where that is asked for and possible."""
    whole = not (p.source.part or p.target.part) and isinstance(p.layout, Layout)
    if not copy and whole and dtype == p.source.dtype == p.target.dtype:
        assert isinstance(p.layout, Layout)
        return p.source.share(p.layout.permutation(len(p.source.shape)))
    array = p.layout.apply(p.source.read())
    with np.errstate(over="ignore", invalid="ignore"):
        return array if dtype == p.source.dtype else array.astype(numpy_dtype(dtype))


def overflow(p: Pair, array: np.ndarray) -> str:
    """Why a cast would lose more than digits, '' if it does not."""
    before = p.layout.apply(p.source.read())
    if not is_float(p.source.dtype):
        gone = int((array != before).sum())
        return f"{gone} values of {p.source.path} do not fit {array.dtype}" if gone else ""
    gone = int((np.isfinite(before.astype(np.float64)) & ~np.isfinite(array.astype(np.float64))).sum())
    return f"{gone} values of {p.source.path} overflow {array.dtype} and would become infinite or NaN" if gone else ""


def entry(p: Pair, dtype: str, shared: bool) -> Entry:
    size = int(np.prod(p.target.shape, dtype=np.int64)) * numpy_dtype(dtype).itemsize
    return Entry(p.source.path, p.target.path, p.layout.name, p.target.shape, p.source.dtype, dtype, size, p.decided_by, shared)
