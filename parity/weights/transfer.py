"""Copy parameters between models and trees of both frameworks."""

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from parity.errors import InputError, TransferError, listed
from parity.weights import collector
from parity.weights.checkpoint import Source, Target, is_path
from parity.weights.files import Tree, count_nan, read_rename, same_bits
from parity.weights.layouts import Layout
from parity.weights.leaf import DTYPES, Leaf, gathered
from parity.weights.merging import Merged
from parity.weights.pairing import Pairing, pair, room_of
from parity.weights.pairs import Pair
from parity.weights.plan import Unpaired, draft


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
        decided_by: `rule` for a row of the ledger, `name` where no layer was known, `rename` where that gave a layout.
        shared: whether source and target now use the same memory.
        merged: paths of the source's arrays from which it was computed, if it was.
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
    merged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Transfer:
    """What a transfer did.

    Attributes:
        value: the filled module, the new tree or `parity.Linen`, or the path of the written checkpoint; None if only planned.
        plan: one entry for each pair of leaves, in the source's order.
        ignored: paths left out because the caller said so.
        random: paths of random state, and of what runs leave behind, which never travel.
        ties: groups of source names that are one array.
        lost_ties: ties that only one side has; one sentence each.
        settings: settings of layers that do not agree, such as an epsilon; one sentence each.
        alone: arrays that have no counterpart by their nature, such as torch's count of batches, and
            what differs although weights and settings agree; one sentence each.
        notes: what was found in checkpoints, such as NaN or the key of the weights; one sentence each.
        verified: whether the result was read back and is bit-equal to what was sent.
        rename: each source name and its target name, slices and given layouts included, to be edited and
            passed as `rename`.
        unpaired: leaves of either side without counterpart, with the names most like theirs.
        problems: why the transfer is refused, of which `unpaired` is a part; only a plan (`dry`) has any.
    """

    value: Any
    plan: tuple[Entry, ...]
    ignored: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    lost_ties: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    verified: bool = False
    rename: dict[str, str] = field(default_factory=dict)
    unpaired: tuple[Unpaired, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the two models now have, or of a plan would have, the same parameters, ties and settings."""
        return not self.settings and not self.lost_ties and not self.problems

    @property
    def draft(self) -> dict[str, str]:
        """`rename`, and for leaves without counterpart the nearest names, each marked as a suggestion by a `?`."""
        return draft(self.rename, self.unpaired)

    @property
    def bytes(self) -> int:
        """The size of all arrays in the target."""
        return sum(entry.bytes for entry in self.plan)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str | None:
        from parity.report.html import fragment

        return fragment(self)

    def text(self, width: int | None = None) -> str:
        """The result in words, no wider than so many columns; without a width one line for each leaf."""
        from parity.report.plan import transfer_text

        return transfer_text(self, width)

    def to_dict(self) -> dict[str, Any]:
        """The result for machines; the value itself is left out."""
        from parity.report.data import document

        return document("transfer", self, ("value", "rename"), arrays=len(self.plan), bytes=self.bytes)


def transfer(
    source: Any,
    target: Any,
    *,
    rename: Mapping[str, str] | str | os.PathLike[str] | None = None,
    ignore: Iterable[str] = (),
    cast: str | None = None,
    copy: bool = True,
    like: Any = None,
    key: str = "",
    overwrite: bool = False,
    verify: bool = False,
    dry: bool = False,
    merge: str | Iterable[str] = (),
    progress: Callable[[int, int, str], None] | None = None,
) -> Transfer:
    """Copy every parameter and buffer of `source` to its counterpart in `target`, bit for bit.

    Strict: every leaf of both sides must have a counterpart, unless it is ignored. All
    problems come in one error, and then nothing has been written.

    Args:
        source: a `torch.nn.Module`, a `state_dict`, an `nnx.Module`, an `nnx.State`, a `parity.Linen` or its
            variables, or the path of a checkpoint: `.safetensors`, its index file or folder, `.pt`, `.pth`, `.bin`,
            `.msgpack`, an Orbax folder. Never changed; no code in a file is run.
        target: likewise. A module is filled in place; a tree or a `parity.Linen` only gives names, shapes and
            dtypes, and a new one is returned in `Transfer.value`. A checkpoint is written beside its
            place and then put there; the end of its name says its kind (a name without one becomes a
            folder of safetensors shards, `.orbax` an Orbax folder).
        rename: names on the torch side to names on the Flax side, of leaves or of modules; used
            in either direction of travel. `{i}` stands for a number that both sides share. A name may
            end in a slice, `c_attn.weight[:, 0:768]`; `h.{i}` -> `h[{i}]` stacks. Behind Flax's name may
            stand layouts, `q.kernel | rotary(8) | transposed`. Between two of one framework: names of
            the source to names of the target. Or the path of a JSON file that holds them.
        ignore: patterns (`*` stands for anything) of leaves on either side to leave out, and of settings
            that may disagree, after torch's path of their layer: `*.padding_idx`. Of the model itself: `padding_idx`.
        cast: None wants equal dtypes; "target" rounds to the target's dtype, "source" gives the
            target the source's dtype, any dtype's name casts to that on arrival.
        copy: False lets both sides use the same memory where the framework can; a later write on
            one side is then seen on the other. Each entry of the plan says whether it is shared.
        like: a model, tree or checkpoint whose names, shapes and dtypes a target path takes on. Without
            it names stay as they are between files and models of one framework; across, the layers
            of a model decide, and of a checkpoint only what its names make certain is converted.
        key: the part of a source checkpoint that is meant, where it holds more than one model's weights: a
            dotted path such as `ema` or `state_dict.model`. Without it the weights of a training state are
            taken, and what is left out is told.
        overwrite: whether a checkpoint that exists is replaced.
        verify: whether the result is read back and compared bit for bit; a checkpoint before it takes
            its place.
        dry: only plan: everything is checked, nothing is written; what would be refused is told in the
            result's `problems` and not raised.
        merge: what torch keeps as several arrays and sends as the one that it computes from them: "weight_norm",
            "spectral_norm", "lora" (from a file "lora=SCALING"), "recurrent biases", or "all". There is no way back.
        progress: called with the bytes that were sent, all bytes, and the array's name.

    Returns:
        What was done, leaf by leaf.

    Raises:
        InputError: source or target is neither a model nor a tree nor a checkpoint, a file is damaged
            or cannot be written, or `cast` is no dtype.
        TransferError: leaves without counterpart or values, shapes or dtypes that do not fit.
        MissingFrameworkError: a framework that is needed is not installed.
    """
    ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore) if isinstance(ignore, Iterable) else (ignore,)
    if not all(isinstance(pattern, str) for pattern in ignore):
        raise InputError(f"ignore takes patterns of names, got {ignore!r}")
    if isinstance(rename, str | os.PathLike):
        rename = read_rename(Path(rename))
    if key and not is_path(source):
        raise InputError("key is for a source that is a path; of a model or tree give the part that is meant")
    source = Source(Path(source), key) if is_path(source) else source
    like = Source(Path(like)) if is_path(like) else like
    if merge:
        source = Merged(room_of(source, "source"), source, merge)
    if is_path(target):
        target = Target(Path(target), source, like, rename, ignore, overwrite=overwrite, verify=verify)
    elif like is not None or overwrite:
        raise InputError("like and overwrite are for a target that is a path; a model or tree says itself what it takes")
    pairing = pair(source, target, rename=rename, ignore=ignore)
    dtypes = {p.target.path: wanted_dtype(p, cast) for p in pairing.pairs}
    problems = pairing.problems + dtype_problems(pairing, cast) + mixed_dtypes(pairing, dtypes)
    problems += tuple(f"{p.source.path} {p.source.unreadable}" for p in pairing.pairs if p.source.unreadable)
    arriving = {p.target.array_path: dtypes[p.target.path] for p in pairing.pairs}
    problems += tuple(pairing.target.refusals(target, arriving | {leaf.array_path: leaf.dtype for leaf in pairing.zeros}))
    if not pairing.pairs and not problems:
        problems = ("neither side has parameters that could travel",)
    sent = Sent(pairing, dtypes, copy, progress)
    problems = problems or tuple(sentence for p in pairing.pairs if (sentence := overflow(p, dtypes[p.target.path])))
    found = (note for side in (source, target) if isinstance(side, Tree) for note in side.notes)
    notes = *pairing.notes, *found

    def outcome(value: Any = None, done: Collection[str] = ()) -> Transfer:
        return Transfer(
            value,
            tuple(entry(p, dtypes[p.target.path], shared=p.target.path in done) for p in pairing.pairs),
            pairing.ignored,
            pairing.random,
            pairing.ties,
            pairing.lost_ties,
            pairing.settings,
            pairing.alone,
            (*notes, *sent.notes.values()),
            verified=verify and value is not None,
            rename=dict(p.names for p in pairing.pairs),
            unpaired=pairing.unpaired,
            problems=problems,
        )

    if dry:
        return outcome()
    if problems:
        planned = outcome()
        raise TransferError(listed("transfer refused, nothing was written", problems), problems, planned.rename, planned)
    # What is lent needs no memory of its own, however long the collector waits.
    with contextlib.nullcontext() if copy else collector.waiting():
        value, done = pairing.target.fill(target, sent)
    if verify and not isinstance(target, Target):
        check_arrived(pairing, value, Sent(pairing, dtypes, copy=True))
    return outcome(value, done)


def as_planned(pairing: Pairing) -> Transfer:
    """How the leaves of two models correspond, nothing being sent."""
    return Transfer(
        None,
        tuple(entry(p, p.target.dtype, shared=False) for p in pairing.pairs),
        pairing.ignored,
        pairing.random,
        pairing.ties,
        pairing.lost_ties,
        pairing.settings,
        pairing.alone,
        pairing.notes,
        rename=dict(p.names for p in pairing.pairs),
        unpaired=pairing.unpaired,
        problems=pairing.problems,
    )


class Sent(Mapping[str, Any]):
    """The arrays as they arrive, by the path of the target's array; each is made when it is asked for.

    An array that arrives in parts is put together, and one that nothing arrives for is made of zeros.

    Attributes:
        notes: what was found in arrays that came from a file, by target path.
    """

    def __init__(
        self,
        pairing: Pairing,
        dtypes: Mapping[str, str],
        copy: bool,
        progress: Callable[[int, int, str], None] | None = None,
    ):
        self.dtypes, self.copy, self.progress = dtypes, copy, progress
        self.pairs: dict[str, list[Pair]] = {}
        for p in pairing.pairs:
            self.pairs.setdefault(p.target.array_path, []).append(p)
        self.zeros: dict[str, list[Leaf]] = {}
        for leaf in pairing.zeros:
            self.zeros.setdefault(leaf.array_path, []).append(leaf)
        self.asked, self.notes = set[str](), dict[str, str]()
        self.sent = 0

    def __getitem__(self, path: str) -> Any:
        pairs, zeros = self.pairs.get(path, []), self.zeros.get(path, [])
        if not zeros and len(pairs) == 1 and pairs[0].target.part is None:
            whole = self.arrived(path, pairs[0])
        else:
            dtype = self.dtypes[pairs[0].target.path] if pairs else ""
            empty = ((leaf, np.zeros(leaf.shape, numpy_dtype(dtype or leaf.dtype))) for leaf in zeros)
            parts = ((p.target, self.arrived(path, p)) for p in pairs)
            whole = gathered(itertools.chain(parts, empty))[path]
        self.told(path, pairs[0].source.path if pairs else path)
        return whole

    def arrived(self, path: str, p: Pair) -> Any:
        """An array, or a part of one, as it arrives."""
        array = travelled(p, self.dtypes[p.target.path], self.copy)
        if p.source.from_file and path not in self.asked and (gone := count_nan(array)):
            note = f"{gone:,} of {array.size:,} values of {p.source.path} are NaN; they were sent as they are"
            self.notes[p.target.path] = note
        return array

    def told(self, path: str, name: str) -> None:
        """Tell of the bytes of an array that is asked for the first time."""
        if path in self.asked:
            return
        self.asked.add(path)
        if self.progress:
            self.sent += self.bytes(path)
            self.progress(self.sent, self.total, name)

    @functools.cached_property
    def total(self) -> int:
        """The bytes of all arrays on arrival."""
        return sum(map(self.bytes, self))

    def bytes(self, path: str) -> int:
        """The size of an array on arrival."""
        sent = sum(bytes_of(p.target.shape, self.dtypes[p.target.path]) for p in self.pairs.get(path, ()))
        return sent + sum(bytes_of(leaf.shape, leaf.dtype) for leaf in self.zeros.get(path, ()))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.pairs, *self.zeros)))

    def __len__(self) -> int:
        return len(self.pairs.keys() | self.zeros)


def check_arrived(pairing: Pairing, value: Any, sent: Mapping[str, np.ndarray]) -> None:
    """Read a filled model or tree back.

    Raises:
        TransferError: it does not hold what was sent.
    """
    found = {leaf.path: leaf for leaf in pairing.target.leaves(value)}
    wrong = [path for path in sent if not same_bits(np.asarray(found[path].read()), sent[path])]
    if wrong:
        raise TransferError(
            f"the target was read back and is not what was sent, at {', '.join(wrong[:4])}; do not use it", wrong
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


def mixed_dtypes(pairing: Pairing, dtypes: Mapping[str, str]) -> tuple[str, ...]:
    """Arrays of the target whose parts would arrive in several dtypes; one sentence each."""
    found: dict[str, dict[str, Pair]] = {}
    for p in pairing.pairs:
        found.setdefault(p.target.array_path, {}).setdefault(dtypes[p.target.path], p)
    return tuple(
        f"{path} would get {' and '.join(f'{p.source.path} in {dtype}' for dtype, p in parts.items())}; "
        'pass cast="target", or the name of one dtype'
        for path, parts in found.items()
        if len(parts) > 1
    )


# Those that both frameworks have.
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def is_float(dtype: str) -> bool:
    return dtype in FLOATS


@functools.cache
def kind(dtype: str) -> str:
    """`float` for any floating point dtype, `int` for any integer one, otherwise the dtype itself."""
    return next((name for name in ("float", "complex", "int") if name in dtype), dtype)


@functools.cache
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


def overflow(p: Pair, dtype: str) -> str:
    """Why a cast would lose more than digits, '' if it does not."""
    if dtype == p.source.dtype:
        return ""
    before, array = p.layout.apply(p.source.read()), travelled(p, dtype, copy=True)
    if not is_float(p.source.dtype):
        gone = int((array != before).sum())
        return f"{gone} values of {p.source.path} do not fit {dtype}" if gone else ""
    # A signalling NaN becomes a quiet one, which is nothing to warn of.
    with np.errstate(invalid="ignore"):
        gone = int((np.isfinite(before.astype(np.float64)) & ~np.isfinite(array.astype(np.float64))).sum())
    return f"{gone} values of {p.source.path} overflow {dtype} and would become infinite or NaN" if gone else ""


def entry(p: Pair, dtype: str, shared: bool) -> Entry:
    size = bytes_of(p.target.shape, dtype)
    how = p.layout.name, p.target.shape, p.source.dtype, dtype, size, p.decided_by, shared, p.source.merged
    return Entry(p.source.path, p.target.path, *how)


def bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    # What is no array has no such dtype; a plan shows it all the same.
    return math.prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES else 0
