"""The levels of agreement, lowest first. Each takes a subject and returns a result; none prints."""

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from parity.errors import NotRecordedError, first_line
from parity.evidence import wiring
from parity.evidence.calls import Call, Evaluation
from parity.evidence.judging import swallowed
from parity.evidence.left_behind import compared_buffers
from parity.evidence.numerics import (
    Identity,
    alike,
    comparable,
    finite_scale,
    identity,
    largest_gap,
    precision,
    same_specials,
    semantics_bound,
    wide,
)
from parity.evidence.overflow import left_range, left_range_note, overflows
from parity.evidence.result import Finding, LevelResult
from parity.evidence.subject import Subject, changed
from parity.evidence.trees import in_words
from parity.evidence.unseen import explained_by_flushing, undecided_integers
from parity.said import Said
from parity.weights.leaf import DTYPES, digest
from parity.weights.pairs import Pair
from parity.weights.paths import split

# How many findings a result keeps: enough to see a pattern, few enough to read.
KEPT = 20
# Of a level whose figures no output could give.
NOTHING = "no output could be compared"


def weights(subject: Subject) -> LevelResult:
    """Every leaf accounted for and bit-equal, read back through the inverse layout; ties and settings kept."""
    pairing = subject.pairing
    findings = [Finding("", sentence) for sentence in (*pairing.problems, *pairing.lost_ties)]
    findings += [Finding("", sentence, {"setting": True}) for sentence in pairing.settings]
    size = 0
    for p in pairing.pairs:
        if p.source.digest or p.target.digest:
            finding, bytes_read = by_digest(p)
            findings, size = findings + finding, size + bytes_read
            continue
        expected, back = p.source.read(), p.layout.inverse().apply(p.target.read())
        size += expected.nbytes
        if expected.dtype != back.dtype:
            findings.append(Finding(p.source.path, f"{expected.dtype} in torch, {back.dtype} in Flax"))
            continue
        bits = f"u{expected.dtype.itemsize}"
        unequal = np.ascontiguousarray(expected).view(bits) != np.ascontiguousarray(back).view(bits)
        if unequal.any():
            worst = worst_index(wide(back), wide(expected), unequal)
            what = (
                f"{int(unequal.sum())} of {unequal.size} values differ from {p.target.path}, worst at {worst}: "
                f"expected (torch) {expected[worst]!s}, actual (flax) {back[worst]!s}"
            )
            findings.append(Finding(p.source.path, what, {"differing": int(unequal.sum()), "elements": unequal.size}))
    figures = {"leaves": len(pairing.pairs), "bytes": size, "ties": len(pairing.ties)}
    if pairing.unpaired and not pairing.pairs:
        figures["cannot be paired"] = True
    notes = (*(Said("left-out", f"left out: {path}") for path in pairing.ignored), *pairing.alone, *pairing.notes)
    if not pairing.pairs and not findings:
        why = "every array is left out, as asked" if pairing.ignored else "neither model has parameters"
        return LevelResult("weights", "not applicable", why, figures)
    summary = f"{len(pairing.pairs)} arrays, {size:,} bytes bit-equal" if not findings else f"{len(findings)} do not agree"
    return verdict("weights", findings, summary, figures, notes)


def by_digest(p: Pair) -> tuple[list[Finding], int]:
    """Whether two arrays are bit-equal of which one is known by its digest alone, or both, and how many bytes they have.

    Raises:
        NotRecordedError: a part of an array, or an array in another layout, has no digest of its own.
    """
    mine, theirs, back = p.source.digest, p.target.digest, p.layout.inverse()
    if p.source.part or p.target.part or (mine and theirs and back.name != "as is"):
        raise NotRecordedError(
            f"{p.source.path} and {p.target.path} cannot be told by digests, since one is laid out otherwise; "
            "record with keep='all'"
        )
    found, known = mine, theirs
    if not theirs:
        known = digest(np.asarray(back.apply(p.target.read())))
    elif not mine:
        found = digest(np.asarray(p.layout.apply(p.source.read())))
    size = math.prod(p.source.shape) * DTYPES[p.source.dtype].itemsize
    what = f"differs from {p.target.path} in some bits: a bundle knows one of them by its digest alone"
    return ([] if found == known else [Finding(p.source.path, what)]), size


def structure(subject: Subject, *, strict: bool = False, spoil: bool = True) -> LevelResult:
    """The same tree, shapes, dtypes, NaN and infinity positions, and the same bad inputs refused."""
    expected, actual = subject.torch_native.outputs, subject.flax_native.outputs
    findings, told = [], list[str]()
    for path in [*expected, *(p for p in actual if p not in expected)]:
        where = f"output {path}" if path else "output"
        if path not in actual or path not in expected:
            side, other = ("torch", "flax") if path in expected else ("flax", "torch")
            findings.append(Finding(where, f"{side} returns it, {other} does not"))
            continue
        mine, theirs = expected[path], actual[path]
        gone = left_range(subject, path, theirs) if isinstance(mine, np.ndarray) and comparable(theirs, mine) else None
        if gone is not None:
            told.append(left_range_note(where, gone, str(mine.dtype)))
            theirs = np.where(gone, mine, theirs).astype(theirs.dtype)
        findings += compare_kind(where, mine, theirs)
    findings += [Finding("", sentence) for sentence in subject.dropping or ()]
    try:
        bad, notes = bad_inputs(subject, strict) if spoil else ([], [])
    except NotRecordedError as error:
        bad, notes = [], [f"bad inputs were not tried: {error}"]
    findings += bad
    summary = f"{len(expected)} outputs" if not findings else f"{len(findings)} do not agree"
    figures = {"outputs": len(expected)} | ({"trees differ": True} if trees_differ(expected, actual) else {})
    return verdict("structure", findings, summary, figures, (*told, *notes))


def compare_kind(where: str, expected: Any, actual: Any) -> list[Finding]:
    """Everything about an output but its finite values."""
    if not isinstance(expected, np.ndarray) or not isinstance(actual, np.ndarray):
        same = type(expected) is type(actual) and (isinstance(expected, np.ndarray) or bool(expected == actual))
        text = f"expected (torch) {kind(expected)}, actual (flax) {kind(actual)}"
        return [] if same else [Finding(where, text)]
    if expected.shape != actual.shape:
        return [Finding(where, f"expected (torch) shape {expected.shape}, actual (flax) {actual.shape}")]
    found = []
    # jax without 64-bit types holds int64 as int32: the same numbers.
    integers = expected.dtype.kind in "iu" and actual.dtype.kind in "iu"
    if expected.dtype != actual.dtype and not integers:
        found.append(Finding(where, f"expected (torch) dtype {expected.dtype}, actual (flax) {actual.dtype}"))
    if not comparable(actual, expected):
        return found
    special = same_specials(actual, expected)
    if not special.all():
        at = tuple(int(i) for i in np.argwhere(~special)[0])
        text = f"NaN or infinity at {int((~special).sum())} places on one side only, first at {at}: "
        found.append(Finding(where, text + f"expected (torch) {expected[at]!s}, actual (flax) {actual[at]!s}"))
    return found


def trees_differ(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> bool:
    """Whether the outputs are other trees: other paths, or at one of them an array on one side only."""
    alike = all(isinstance(leaf, np.ndarray) == isinstance(actual.get(path), np.ndarray) for path, leaf in expected.items())
    return set(expected) != set(actual) or not alike


def kind(value: Any) -> str:
    return f"an array {value.shape} {value.dtype}" if isinstance(value, np.ndarray) else in_words(value)


def bad_inputs(subject: Subject, strict: bool) -> tuple[list[Finding], list[str]]:
    """Whether both sides refuse, or accept, inputs that do not fit."""
    if isinstance(subject.torch.raises(subject.torch_model, subject.call), str):
        return [], ["bad inputs were not tried: the torch model cannot run on shapes alone"]
    findings, notes = list[Finding](), list[str]()
    for what, call, soft in spoiled(subject):
        expected = torch_outcome(subject, call, soft)
        actual = subject.flax.raises(subject.flax_model, call)
        if isinstance(expected, str) == isinstance(actual, str) and (isinstance(expected, str) or expected == actual):
            continue
        sentence = f"{what}: expected (torch) {outcome(expected)}; actual (flax) {outcome(actual)}"
        # A natural port promotes where torch refuses, or has a norm without parameters that takes any width; or it
        # refuses aloud what torch happens to take, as jax.nn.dot_product_attention does values of another width
        # than the keys'. On what both take that is no other function.
        one_refuses = isinstance(expected, str) or isinstance(actual, str)
        if (soft or one_refuses) and not strict:
            notes.append(Said("dtype-not-refused", f"also tried, counts only with strict=True: {sentence}"))
        else:
            findings.append(Finding("input", sentence))
    return findings, notes


def torch_outcome(subject: Subject, call: Call, soft: bool) -> Any:
    """What the torch model does with arguments: the error, or the shapes of its outputs."""
    # On shapes alone torch does not notice that dtypes do not fit.
    if not soft:
        return subject.torch.raises(subject.torch_model, call)
    try:
        with subject.torch.pinned():
            outputs = subject.torch.evaluate(subject.torch_model, call).outputs
    except NotRecordedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return tuple(array.shape for array in outputs.values() if isinstance(array, np.ndarray))


def outcome(result: str | tuple[tuple[int, ...], ...]) -> str:
    return f"raises {result}" if isinstance(result, str) else f"returns shapes {', '.join(map(str, result))}"


def spoiled(subject: Subject) -> list[tuple[str, Call, bool]]:
    """Calls that do not fit, in words, and whether a difference is only worth a note."""
    calls = []
    values = [(path, array) for path, array in subject.values() if array.ndim]
    for path, array in values:
        wider = np.concatenate([array, array[..., :1]], axis=-1) if array.shape[-1] else array
        calls.append((f"{path} one wider than it should be", replaced(subject.call, path, wider), False))
        other = np.float16 if array.dtype != np.float16 else np.float32
        with np.errstate(over="ignore"):
            calls.append((f"{path} in {np.dtype(other)}", replaced(subject.call, path, array.astype(other)), True))
    if values and all(array.ndim > 1 and array.shape[0] for _, array in values):
        calls.append(("inputs without their first axis", changed(subject.call, lambda _, a: a[0] if a.ndim else a), True))
    return calls


def replaced(call: Call, path: str, array: np.ndarray) -> Call:
    return changed(call, lambda where, old: array if where == path else old)


def identical(subject: Subject) -> LevelResult:
    """Both sides in float64, rounded once to float32: bit-equal, but for proved rounding ties."""
    if not numbers(subject.torch_native):
        return LevelResult("identical", "not applicable", "the torch model returns no numbers")
    if only_whole_numbers(subject):
        return LevelResult("identical", "not applicable", NOTHING_TO_WIDEN)
    stopped = cannot_run_wide(subject)
    if stopped:
        return LevelResult("identical", "not run", stopped)
    results, findings = [], []
    for path, oracle in subject.torch_wide.floats.items():
        actual = subject.flax_wide.outputs.get(path)
        where = f"output {path}" if path else "output"
        if not comparable(actual, oracle):
            findings.append(Finding(where, "cannot be compared: see the level structure"))
            continue
        result, wrong = judged(subject, "outputs", path, actual, oracle)
        results.append(result)
        if not result.passed:
            findings.append(described_gap(where, result, wrong, actual, oracle))
    unequal, notes = unequal_integers(subject, "float64")
    left, untold = compared_buffers(subject)
    findings, notes = [*findings, *unequal, *left], [*notes, *untold]
    if not findings and not any(isinstance(a, np.ndarray) and a.size for a in subject.torch_native.outputs.values()):
        return LevelResult("identical", "not applicable", "the models return no numbers")
    outputs = subject.torch_wide.outputs.values()
    whole = sum(a.size for a in outputs if isinstance(a, np.ndarray) and a.dtype.kind in "biu")
    return identity_verdict("identical", results, findings, tuple(notes), whole)


def judged(
    subject: Subject,
    kind: str,
    path: str,
    actual: np.ndarray,
    oracle: np.ndarray,
    scale: float | None = None,
    *,
    second: bool = True,
) -> tuple[Identity, np.ndarray]:
    """`identity` by torch's float32 noise; if that does not explain a difference, by its float64 noise too if asked.

    Values without a magnitude given for them are judged by that of values like them.
    """
    native, wrong, results = wide(getattr(subject.torch_native, kind)[path]), np.zeros(oracle.shape, bool), []
    parts = alike(oracle) if scale is None else [...]
    for number, part in enumerate(subject.padding.parts(path, oracle.shape, parts) if kind == "outputs" else parts):
        mine, theirs = actual[part], oracle[part]
        result, wrong[part] = identity(mine, theirs, semantics_bound(native[part], theirs, scale))
        # Where torch has exactly 0, its plain runs allow nothing: only roundings show whether 0 is more than luck.
        if second and not result.passed and (np.isfinite(result.ratio) or not result.bound):
            # This second look costs four runs, so it is taken only where the first one fails.
            own = subject.wide_noise(kind, path)[number]
            bound = semantics_bound(native[part], theirs, scale, own)
            # Where torch rounds at a tie, half an ulp before it is a whole step behind it, and would explain any fault.
            if kind != "outputs" or not swallowed(result.ratio * result.bound, result.bound, bound):
                result, wrong[part] = identity(mine, theirs, bound)
        results.append(result)
    return together(results), wrong


def together(results: list[Identity]) -> Identity:
    """One result for the parts of an array, with the bound of the worst."""
    worst = max(results, key=lambda r: r.ratio)
    names = ("elements", "equal", "ties", "cancelled", "unexplained")
    counts: dict[str, Any] = {name: sum(getattr(r, name) for r in results) for name in names}
    return Identity(**counts, ratio=worst.ratio, bound=worst.bound, zero=all(r.zero for r in results))


def identity_verdict(
    level: str, results: list[Identity], findings: list[Finding], notes: tuple[str, ...] = (), whole: int = 0
) -> LevelResult:
    """The level by its figures; `whole` counts the whole numbers that were compared besides."""
    figures = {
        "elements": sum(r.elements for r in results),
        "equal": sum(r.equal for r in results),
        "ties": sum(r.ties for r in results),
        "cancelled": sum(r.cancelled for r in results),
        "unexplained": sum(r.unexplained for r in results),
        "ratio": max((r.ratio for r in results), default=0.0),
        "zero": sum(r.zero for r in results),
    }
    figures |= {"whole numbers": whole} if whole else {}
    if not results and (findings or whole):
        summary = (f"{whole:,} whole numbers" + (" equal" if not findings else "")) if whole else NOTHING
        return verdict(level, findings, summary, figures, notes)
    summary = f"{figures['equal']:,} of {figures['elements']:,} values bit-equal"
    if figures["ties"]:
        summary += f", {figures['ties']} proved rounding ties"
    if figures["cancelled"]:
        summary += f", {figures['cancelled']} that cancel to less than float64 resolves"
    if figures["unexplained"]:
        summary += f", {figures['unexplained']:,} unexplained"
    if findings and figures["ratio"] > 1:
        summary += f"; error {figures['ratio']:.3g} times what rounding explains"
    return verdict(level, findings, summary, figures, notes)


def described_gap(where: str, result: Identity, wrong: np.ndarray, actual: np.ndarray, oracle: np.ndarray) -> Finding:
    gap = largest_gap(actual, oracle)
    rounded_away = "" if wrong.any() else " in float64, though none once rounded to float32"
    if rounded_away:
        wrong = ~(np.abs(actual - oracle) <= result.bound)
    at = worst_index(actual, oracle, wrong)
    what = (
        f"{int(wrong.sum())} of {wrong.size} values differ{rounded_away}, error {result.ratio:.3g} times what rounding "
        f"explains; worst at {at}: expected (torch) {oracle[at]:.9g}, actual (flax) {actual[at]:.9g}"
    )
    return Finding(where, what, {"differing": int(wrong.sum()), "elements": wrong.size, "ratio": result.ratio, "atol": gap})


def unequal_integers(subject: Subject, dtype: str | None = None) -> tuple[list[Finding], list[str]]:
    """Whole numbers that differ, such as the place of a maximum, and what is told of those that hang on a tie.

    Args:
        subject: the pair.
        dtype: `float64` compares the float64 runs, None those in the deployed dtype.
    """
    expected, actual = (
        (subject.torch_wide, subject.flax_wide) if dtype == "float64" else (subject.torch_native, subject.flax_native)
    )
    found, notes = list[Finding](), list[str]()
    for path, mine in expected.outputs.items():
        theirs = actual.outputs.get(path)
        if not isinstance(mine, np.ndarray) or not isinstance(theirs, np.ndarray):
            continue
        if mine.dtype.kind not in "biu" or mine.shape != theirs.shape or np.array_equal(mine, theirs):
            continue
        where = f"output {path}" if path else "output"
        wrong = mine != theirs
        tied = undecided_integers(subject, path, wrong, dtype)
        if tied.any():
            text = f"{where}: {int(tied.sum())} whole numbers hang on a tie, and agree where there is none"
            notes.append(Said("integers-on-ties", text))
        if (wrong & ~tied).any():
            found.append(Finding(where, f"{int((wrong & ~tied).sum())} of {mine.size} whole numbers differ"))
    return found, notes


def cannot_run_wide(subject: Subject) -> str | None:
    """Why the models cannot be compared in float64, None if they can."""
    for side in ("torch", "flax"):
        name = "the torch model" if side == "torch" else "the Flax model"
        try:
            getattr(subject, f"{side}_wide")
        except Exception as error:
            return f"{name} does not run in float64: {type(error).__name__}: {first_line(error)}"
        pinned = subject.pinned_dtype(side)
        if pinned:
            return f"{name} pins a dtype: {pinned}; remove the cast or the dtype argument to let it run in float64"
    return None


NOTHING_TO_WIDEN = "nothing that the models are given or hold is a floating point number, so that none runs in float64"


def only_whole_numbers(subject: Subject) -> bool:
    """Whether floating point outputs come of ids, flags and lengths alone: no run in another dtype is another run."""
    held = [leaf for leaf in subject.torch.leaves(subject.torch_model) if "float" in leaf.dtype]
    return bool(subject.torch_native.floats) and not held and not subject.call.castable


def numbers(run: Evaluation) -> bool:
    return any(isinstance(array, np.ndarray) and array.size for array in run.outputs.values())


def native(subject: Subject, *, modes: tuple[str, ...] = ("compiled", "eager")) -> LevelResult:
    """In the deployed dtype, Flax's error is within the noise of torch's own."""
    try:
        oracle = subject.torch_wide
    except Exception as error:
        return LevelResult("native", "not run", f"no float64 oracle: {type(error).__name__}: {first_line(error)}")
    findings, notes = unequal_integers(subject)
    if not oracle.floats and not findings:
        what = "the torch model returns no floating point numbers"
        return LevelResult("native", "not applicable", what, notes=tuple(notes))
    if not findings and not any(a.size for a in oracle.floats.values()):
        return LevelResult("native", "not applicable", "the models return no numbers", notes=tuple(notes))
    worst, measured = 0.0, 0
    for mode in modes:
        run = subject.flax_native if mode == "compiled" else subject.flax_eager
        for path, expected in oracle.floats.items():
            actual = run.outputs.get(path)
            where = f"output {path} ({mode})" if path else f"output ({mode})"
            if not comparable(actual, expected):
                findings.append(Finding(where, "cannot be compared: see the level structure"))
                continue
            found, ratio = imprecise(subject, where, "outputs", path, actual, wide(expected))
            findings += found or narrowed(where, actual, subject.torch_native.outputs[path])
            worst, measured = max(worst, ratio), measured + 1
    figures = {"dtype": subject.dtype, "modes": list(modes), "ratio": worst}
    if findings:
        figures["atol"] = max(finding.figures.get("atol", 0.0) for finding in findings)
    summary = f"{subject.dtype}, {' and '.join(modes)}: error {worst:.2g} times the allowed" if measured else NOTHING
    return verdict("native", findings, summary, figures, tuple(notes))


# So many values that hold by chance what a narrower dtype can hold are unlikely: each does in one of 256 cases or fewer.
FEW = 8


def narrowed(where: str, actual: np.ndarray, expected: np.ndarray) -> list[Finding]:
    """An output of more digits than the model's dtype has, or as many, of which Flax uses those of a narrower one alone.

    The noise of a model in bfloat16 hides what a softmax in bfloat16 loses, but torch's float32 result holds it.
    """
    for narrow in (ml_dtypes.bfloat16, np.float16):
        if actual.dtype != expected.dtype or actual.dtype.itemsize <= np.dtype(narrow).itemsize:
            continue
        full, cut = (used(array, narrow) for array in (expected, actual))
        if full.size >= FEW and full.mean() > 0.5 and cut.size and not cut.any():
            what = (
                f"{actual.dtype} that holds numbers of {np.dtype(narrow)} alone, torch's has more digits: it was rounded there"
            )
            return [Finding(where, f"{what}; compute it in {actual.dtype}")]
    return []


def used(array: np.ndarray, narrow: Any) -> np.ndarray:
    """Which of the finite numbers other than 0 need more digits than a dtype has."""
    values = array[np.isfinite(array) & (array != 0)]
    with np.errstate(over="ignore"):
        return np.asarray(values.astype(narrow).astype(values.dtype) != values)


def imprecise(
    subject: Subject, where: str, kind: str, path: str, actual: np.ndarray, oracle: np.ndarray, scale: float | None = None
) -> tuple[list[Finding], float]:
    """What is wrong with the precision of one array, and its error over the allowed one."""
    [seen] = subject.padding.parts(path, oracle.shape, [...]) if kind == "outputs" else [...]
    whole, actual, oracle = actual, actual[seen], oracle[seen]
    plain, dtype = getattr(subject.torch_native, kind)[path][seen], subject.dtype
    special = same_specials(actual, plain)
    gone = left_range(subject, path, whole) if kind == "outputs" and not special.all() else None
    special = special if gone is None else special | gone[seen]
    if not special.all():
        return [Finding(where, f"NaN or infinity on one side only at {int((~special).sum())} places")], float("inf")
    # By its one plain run alone, which explains nearly every port that is right.
    noise = subject.noise("plain", kind, path)
    result = precision(actual, noise, oracle, dtype, scale)
    for more in ("ensemble", "shaken", "elementary", "elementary_more"):
        if result.passed:
            break
        # Where values cancel, jittered inputs do not show how much the roundings inside matter, nor do kernels that
        # round once at their end. Each look costs runs and only allows more, so it is taken where those before it fail.
        noise = noise.joined(subject.noise(more, kind, path))
        result = precision(actual, noise, oracle, dtype, scale, last=more.startswith("elementary"))
    ratio = max(result.max_ratio, result.rms_ratio)
    if result.passed:
        return [], ratio
    atol = largest_gap(actual, plain)
    what = (
        f"error {result.max_error:.3g} where torch's own is {result.torch_error:.3g} in {dtype}: {result.max_ratio:.3g} times "
        f"the allowed, {result.rms_ratio:.3g} times in the mean square; would pass at atol={atol:.3g}"
    )
    if kind == "outputs" and dtype in ("float32", "bfloat16"):
        what += explained_by_flushing(subject, path, actual, noise, oracle, seen)
    return [Finding(where, what, {"max_ratio": result.max_ratio, "rms_ratio": result.rms_ratio, "atol": atol})], ratio


def gradient_notes(subject: Subject, tied: list[str], kinks: int, overflown: int, zero: list[str]) -> Iterator[Said]:
    """What a reader must know of how gradients were compared."""
    if tied:
        what = f"{subject.ties} values tie for a maximum, where frameworks choose other gradients"
        text = f"{what}: compared on inputs moved off them, gradients of {', '.join(tied)} agree"
        yield Said("gradients-off-ties", text)
    if not subject.native_gradients:
        yield Said("gradients-in-float64", "compared in float64 only")
    if kinks:
        text = f"{kinks} values lie within rounding of a kink: {subject.dtype} gradients were compared in float64 only"
        yield Said("gradients-in-float64", text)
    if overflown:
        text = f"{overflown} of torch's own {subject.dtype} values overflow: gradients were compared in float64 only"
        yield Said("gradients-in-float64", text)
    if zero:
        text = f"zero in exact arithmetic, so that both sides show rounding alone: {', '.join(zero)}"
        yield Said("zero-gradient", text)


def gradients(subject: Subject) -> LevelResult:
    """Gradients of parameters and inputs for a fixed random cotangent: identical in float64, precise natively."""
    if only_whole_numbers(subject):
        return LevelResult("gradients", "not applicable", "nothing here has a gradient")
    stopped = not_differentiable(subject) or cannot_run_wide(subject)
    if isinstance(stopped, LevelResult):
        return stopped
    if stopped:
        return LevelResult("gradients", "not run", stopped)
    if not subject.torch_wide.gradients or not subject.cotangents:
        return LevelResult("gradients", "not applicable", "nothing here has a gradient")
    if not numbers(subject.torch_wide):
        return LevelResult("gradients", "not applicable", "the models return no numbers")
    missing, triples = paired_gradients(subject)
    results, findings, worst = [], missing, 0.0
    tied: list[str] = []
    zero: list[str] = []
    kinks = subject.kinks if subject.native_gradients else 0
    overflown = overflows(subject) if subject.native_gradients else 0
    scales = gradient_scales(subject)
    for path, actual, oracle, flax_native in triples:
        judge = functools.partial(judged, subject, "gradients", path, wide(actual), wide(oracle), scales[path])
        result, wrong = judge(second=False)
        # At a tie torch's own gradient jumps when it is shaken, so that its noise would explain anything.
        if not result.passed and not subject.ties:
            result, wrong = judge()
        elif not result.passed and agrees_off_ties(subject, path):
            tied.append(path)
            continue
        results.append(result)
        zero += [path] if result.zero else []
        if not result.passed:
            found = described_gap(f"gradient of {path}", result, wrong, wide(actual), wide(oracle))
            if subject.on_kinks and agrees_off_ties(subject, path):
                text = f"; {subject.on_kinks} values lie exactly on a kink, and on inputs moved off them it agrees"
                found = replace(found, what=found.what + text)
            findings.append(found)
        elif flax_native is not None and not kinks and not overflown and not result.zero:
            name = f"gradient of {path}"
            lost, ratio = imprecise(subject, name, "gradients", path, flax_native, wide(oracle), scales[path])
            findings += lost
            worst = max(worst, ratio)
    notes = list(gradient_notes(subject, tied, kinks, overflown, zero))
    findings = nearest_first(subject, triples, findings)
    level = identity_verdict("gradients", results, findings)
    alone = unpaired_gradients(subject)
    if alone and not findings:
        what = f"parameters are not paired, see the level weights: {', '.join(alone[:3])}{' and others' if alone[3:] else ''}"
        return LevelResult("gradients", "not run", f"{what}; gradients of inputs agree", level.figures, notes=tuple(notes))
    figures = {**level.figures, "native_ratio": worst, "kinks": kinks}
    return LevelResult("gradients", level.status, level.summary, figures, level.findings, tuple(notes))


def nearest_first(subject: Subject, triples: list[Any], findings: list[Finding]) -> list[Finding]:
    """Findings in the order in which gradients come back, those nearest the loss first, each with its cause if that shows."""
    if not findings:
        return findings
    from parity.evidence.gradient_causes import explained

    try:
        with subject.torch.pinned():
            given = subject.torch.observe_backward(subject.torch_model, subject.call, subject.cotangents or {}, dtype="float64")
        order = {f"gradient of {name}": place for place, name in enumerate(given.order)}
    except Exception:
        order = {}
    known = {f"gradient of {path}": (path, actual, oracle) for path, actual, oracle, _ in triples}
    ordered = []
    for finding in sorted(findings, key=lambda finding: order.get(finding.where, len(order))):
        why = explained(subject, *known[finding.where]) if finding.where in known and "atol" in finding.figures else ""
        ordered.append(replace(finding, what=f"{finding.what}; {why}") if why else finding)
    return ordered


def unpaired_gradients(subject: Subject) -> list[str]:
    """Torch parameters whose gradients are not compared although nobody asked to leave them out."""
    known = {p.source.array_path for p in subject.pairing.pairs} | {*subject.pairing.ignored, *subject.pairing.aside}
    # A further name of a tied parameter that is paired under another name is compared with it.
    known |= {name for group in subject.pairing.ties if known & set(group) for name in group}
    return [path for path in subject.torch_wide.gradients if not path.startswith("input ") and path not in known]


def not_differentiable(subject: Subject) -> LevelResult | None:
    """The level, where a side that runs forwards raises on the way back; None if both return gradients."""
    runs = subject.torch_native, subject.flax_native  # noqa: F841 - what they raise is known once they ran
    if "torch" in subject.not_differentiable:
        why = f"the torch model cannot be differentiated: {subject.not_differentiable['torch']}"
        return LevelResult("gradients", "not run", why)
    if "flax" in subject.not_differentiable:
        what = f"expected (torch) gradients; actual (flax) raises {subject.not_differentiable['flax']}"
        return LevelResult("gradients", "failed", "Flax cannot be differentiated", findings=(Finding("", what),))
    return None


def paired_gradients(subject: Subject) -> tuple[list[Finding], list[tuple[str, np.ndarray, np.ndarray, np.ndarray | None]]]:
    """Flax's float64 gradient, torch's, and Flax's native one, if any, under each torch path, in torch's layout."""
    wide_run, native_run = subject.flax_wide.gradients, subject.flax_native.gradients
    found, missing = [], []
    for path, (pairs, names) in gradient_names(subject).items():
        oracle = subject.torch_wide.gradients[path]
        if any(name not in wide_run for name in names):
            missing.append(Finding(f"gradient of {path}", "Flax has none: its counterpart is no parameter"))
            continue
        native_gradient = None
        if all(name in native_run for name in names):
            native_gradient = in_torch(path, pairs, names, native_run, subject.torch_native.gradients[path])
        found.append((path, in_torch(path, pairs, names, wide_run, oracle), oracle, native_gradient))
    return missing, found


def gradient_names(subject: Subject) -> dict[str, tuple[list[Pair], list[str]]]:
    """For each of torch's gradients the pairs it belongs to, and the names of Flax's gradients."""
    wide_run = subject.flax_wide.gradients
    # An array that Flax has under several names has its gradient under the first.
    first_names = {whole(p): p.target.array_path for p in subject.pairing.pairs if p.target.array_path in wide_run}
    by_array: dict[str, list[Pair]] = {}
    for p in subject.pairing.pairs:
        by_array.setdefault(p.source.array_path, []).append(p)
    found = {}
    for path in subject.torch_wide.gradients:
        pairs = by_array.get(path, [])
        names = [path] if path.startswith("input ") else [first_names.get(whole(p), p.target.array_path) for p in pairs]
        if names:
            found[path] = pairs, names
    return found


def agrees_off_ties(subject: Subject, path: str) -> bool:
    """Whether a gradient agrees on inputs that are moved off all ties and kinks."""
    other = subject.off_ties
    try:
        found = {name: (wide(actual), wide(oracle)) for name, actual, oracle, _ in paired_gradients(other)[1]}
        return path in found and judged(other, "gradients", path, *found[path], gradient_scales(other)[path])[0].passed
    except Exception:
        # What does not run on other inputs explains nothing.
        return False


def whole(p: Pair) -> Hashable:
    """What Flax's array of a pair is known by, though the pair may be about a part of it."""
    return p.target.part.identity if p.target.part else p.target.identity


def in_torch(
    path: str, pairs: list[Pair], names: list[str], gradients: Mapping[str, np.ndarray], own: np.ndarray
) -> np.ndarray:
    """Flax's gradient in torch's layout; that of an array of which Flax has the blocks is put together.

    A block that only torch has, such as a second bias, stays torch's own: there is nothing to compare it with.
    """
    if not pairs:
        return gradients[path]
    blocks = [
        (p.source.part, p.layout.inverse().apply(p.target.of(gradients[name]))) for p, name in zip(pairs, names, strict=True)
    ]
    first = blocks[0][0]
    if first is None:
        return blocks[0][1]
    filled = np.array(first.before.apply(own) if first.before else own, dtype=blocks[0][1].dtype)
    for part, block in blocks:
        assert part is not None
        filled[part.index] = block
    return first.before.inverse().apply(filled) if first.before else filled


def gradient_scales(subject: Subject) -> dict[str, float]:
    """The magnitude by which each gradient is judged: a bias has that of its sibling kernel, if that is larger."""
    return magnitudes(subject.torch_wide.gradients)


def magnitudes(gradients: Mapping[str, np.ndarray]) -> dict[str, float]:
    """`gradient_scales` of gradients by path."""
    own = {path: finite_scale(g) for path, g in gradients.items()}
    by_owner: dict[str, float] = {}
    for path, scale in own.items():
        if not path.startswith("input "):
            layer = split(path)[0]
            by_owner[layer] = max(by_owner.get(layer, 0.0), scale)
    return {path: by_owner.get(split(path)[0], scale) if path.endswith("bias") else scale for path, scale in own.items()}


def worst_index(actual: np.ndarray, expected: np.ndarray, among: np.ndarray) -> tuple[int, ...]:
    # Infinities on both sides leave no number.
    with np.errstate(invalid="ignore"):
        gap = np.abs(wide(actual) - wide(expected))
    gap = np.where(among, np.nan_to_num(gap, nan=np.inf, posinf=np.inf), -1.0)
    return tuple(int(i) for i in np.unravel_index(int(gap.argmax()), gap.shape))


def verdict(
    level: str, findings: list[Finding], summary: str, figures: dict[str, Any], notes: tuple[str, ...] = ()
) -> LevelResult:
    kept = tuple(findings[:KEPT])
    more = len(findings) - len(kept)
    return LevelResult(
        level,
        "failed" if findings else "passed",
        summary,
        figures,
        kept,
        (*notes, Said("more-findings", f"{more} more findings are not listed")) if more > 0 else notes,
    )


CLIMB: dict[str, Callable[..., LevelResult]] = {
    "weights": weights,
    "structure": structure,
    "wiring": wiring.wiring,
    "identical": identical,
    "native": native,
    "gradients": gradients,
}
