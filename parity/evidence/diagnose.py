"""Why a module differs: every hypothesis is tried on it alone, and the causes are those that make the difference vanish."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from parity.errors import InputError, first_line
from parity.evidence.faults import Cause, Diagnosis
from parity.evidence.hypotheses.flax_side import FlaxSearch
from parity.evidence.hypotheses.suspect import Edited, Suspect, Variant
from parity.evidence.hypotheses.table import HYPOTHESES, LEFT_ON, WEIGHTS, Hypothesis
from parity.evidence.isolation_recorded import isolator_of
from parity.evidence.operations import named
from parity.evidence.precision import diagnose_precision
from parity.evidence.subject import Subject
from parity.evidence.unseen_arrays import with_unseen
from parity.said import Said
from parity.weights.rules import in_words_of

# Causes told for one module; what fits as well beyond that adds nothing to read.
TOLD = 5
# A weight that is off by one ulp differs by 2,700 times what rounding explains or more (see SEMANTICS_FACTOR).
FAINT = 1000.0
# Edits on top of which a second fault is looked for, and what one may leave of the difference to be among them.
PAIRED, HELPFUL = 8, 0.95
# Seconds for the hypotheses on all wrong modules together; each module may take its share of what is left. Of those of
# the catalogue in benchmarks/faults one takes 0.2 to 3 s.
SECONDS = 120.0
# The share of a module's time in which others are looked for beside a cause that explains everything.
BESIDE = 0.25
# Variants that are tried however long they take.
FIRST = 8


def diagnose(
    torch_model: Any,
    flax_model: Any,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
    ignore: Iterable[str] = (),
    seed: int = 0,
    seconds: float = SECONDS,
) -> Diagnosis:
    """Find which modules of a Flax model are wrong, why, and what to change.

    Every pair of modules is run alone in float64. For each that differs, torch's module is run
    again as the Flax module would be if it had one of the faults that ports are known to have:
    a cause is a fault that makes the difference vanish in what rounding explains.

    Args:
        torch_model: a `torch.nn.Module` in eval mode.
        flax_model: an `nnx.Module` in eval mode, or a `parity.Linen`.
        args: positional arguments for both.
        kwargs: keyword arguments for both.
        rename: as in `parity.transfer`.
        ignore: as in `parity.transfer`.
        seed: of the numbers by which rounding is measured.
        seconds: how long hypotheses are tried, over all wrong modules; the wrong modules are all named first,
            however long that takes. A note says where time ran out.

    Returns:
        Causes by module, the best first; wrong modules that no hypothesis explains are named too.

    Raises:
        InputError: a model or an argument cannot be compared as it stands, the torch model refuses it, they differ and
            one of them returns other numbers when it is run again, by other means than the random keys of jax
            ('not repeatable'), or `seconds` is no positive number.
    """
    seconds = checked_seconds(seconds, "seconds")
    subject = Subject(torch_model, flax_model, args, kwargs or {}, rename=rename, ignore=ignore, seed=seed, gradients=False)
    subject.renew()
    found = diagnose_subject(subject, seconds)
    # What draws by jax's keys is explained by that.
    if not found.passed and not any(cause.hypothesis == LEFT_ON for cause in found.causes):
        subject.check_repeatable()
    return found


def checked_seconds(seconds: Any, name: str) -> float:
    """A time for trying causes.

    Raises:
        InputError: it is none.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise InputError(f"{name} must be a positive number, got {seconds!r}; it is the time for trying causes")
    return float(seconds)


def diagnose_subject(subject: Subject, seconds: float = SECONDS) -> Diagnosis:
    """`diagnose` for models that are already checked."""
    isolator = isolator_of(subject)
    # Where torch's module cannot be run, Flax's is.
    search_of: Any = FlaxSearch if "torch" in subject.recorded else Search
    isolation = named(isolator, isolator.run())
    causes: list[Cause] = []
    unexplained, tried, notes = [], 0, list[str]()
    trials = [isolator.trials.get((fault.path, fault.call)) for fault in isolation.faults]
    end = time.monotonic() + seconds
    for number, (fault, trial) in enumerate(zip(isolation.faults, trials, strict=True)):
        if trial is None or trial.error:
            continue
        search = search_of(Suspect(isolator, trial), max(end - time.monotonic(), 0.0) / (len(trials) - number))
        found = search.run()
        tried += search.tried
        causes += found
        notes += search.notes
        if search.late:
            place = fault.path or "the model"
            text = f"{place}: of {seconds:g} s for causes its share ran out after {search.tried} tries; give more by seconds="
            notes.append(Said("time-ran-out", text))
        left = search.left(found)
        if left:
            unexplained.append(f"{fault.path or 'the model'}: {', '.join(left)}")
    isolation, unseen = with_unseen(isolator, isolation)
    causes += unseen
    if not subject.recorded and not causes and all(fault.ratio < FAINT for fault in isolation.faults):
        # The same function, or one that is computed so that digits are lost: the dtype of the models shows which.
        native, losses = diagnose_precision(subject)
        if losses or isolation.passed:
            known = {cause.path for cause in losses}
            unexplained = [f"{fault.path or 'the model'}: precision" for fault in native.faults if fault.path not in known]
            isolation, causes = isolation if native.passed else native, losses
    return Diagnosis(tuple(causes), isolation, tuple(unexplained), tried, tuple(notes), subject.pairing.settings)


class Search:
    """All hypotheses on one suspect.

    Args:
        suspect: the pair.
        seconds: after which no further variant is tried.
    """

    def __init__(self, suspect: Suspect, seconds: float = SECONDS):
        self.suspect, self.tried = suspect, 0
        self.notes: list[str] = []
        self.began, self.seconds, self.late = time.monotonic(), seconds, False
        # Edits that make the difference smaller: what is left of it, the hypothesis, the variant.
        self.helpful: list[tuple[float, str, Variant]] = []

    def run(self) -> list[Cause]:
        """The causes, best first."""
        causes = self.attempt(WEIGHTS)
        if any(cause.complete for cause in causes):
            return causes
        # The rest is tried with Flax's own arrays in torch's module, so that faults of both kinds are found.
        self.suspect.baseline = {w.path: w.flax for w in self.suspect.weights if not w.equal}
        for resort in (False, True):
            if resort and any(cause.complete for cause in causes):
                break
            self.suspect.open = self.left(causes)
            for hypothesis in sorted(HYPOTHESES, key=lambda one: not one.cheap):
                enough = any(cause.complete for cause in causes) and self.spent() > BESIDE * self.seconds
                if hypothesis.resort is resort and not enough:
                    causes += self.attempt(hypothesis)
        if self.left(causes):
            causes += self.in_pairs()
        return self.ranked(causes)

    def spent(self) -> float:
        return time.monotonic() - self.began

    def in_pairs(self) -> list[Cause]:
        """Two faults of one module at the same place: every hypothesis again, on top of the edits that help most."""
        found: list[Cause] = []
        helpful = sorted(self.helpful, key=lambda entry: entry[0])[:PAIRED]
        for _, name, first in helpful:
            assert isinstance(first.values, Edited)
            self.suspect.base = first.values.edits
            for hypothesis in HYPOTHESES:
                for cause in () if hypothesis.resort else self.attempt(hypothesis):
                    joined = f"{first.what}; and {cause.what}", f"{first.change}; and {cause.change}"
                    text = (f"{name} and {cause.hypothesis}", cause.path, *joined)
                    found.append(Cause(*text, cause.before, cause.after, cause.explains, cause.complete))
            self.suspect.base = {}
            if any(cause.complete for cause in found):
                break
        return found

    def ranked(self, causes: list[Cause]) -> list[Cause]:
        """What explains most first; then the smallest rest, where rests within rounding are alike; then the table's order."""
        names = [WEIGHTS.name, *(hypothesis.name for hypothesis in HYPOTHESES)]
        order = {name: names.index(name) for name in names}
        ordered = sorted(causes, key=lambda c: (-len(c.explains), max(c.after, 1.0), order.get(c.hypothesis, len(order))))
        kept: list[Cause] = []
        for cause in ordered:
            # A cause of fewer places is told only for what better ones leave open.
            known = {place for other in kept if len(other.explains) > len(cause.explains) for place in other.explains}
            if set(cause.explains) - known:
                kept.append(cause)
        return kept[:TOLD]

    def attempt(self, hypothesis: Hypothesis) -> list[Cause]:
        """The variants of one hypothesis that explain something and break nothing."""
        found: list[Cause] = []
        # Begun with the first: what a user wrote may raise before, or be no sequence at all.
        variants: Iterator[Variant] | None = None
        while not self.late:
            # The first few in any case: a module whose time ran out before its turn still gets the likeliest.
            self.late = self.spent() > self.seconds and self.tried >= FIRST
            try:
                variants = iter(hypothesis.variants(self.suspect)) if variants is None else variants
                variant = next(variants, None)
                if variant is None:
                    break
                if not isinstance(variant, Variant) or not callable(variant.values):
                    raise TypeError(f"it yields {variant!r}, which is no parity.Variant with a function for its values")
                cause = self.judged(hypothesis, variant)
            except Exception as error:
                said = f"{type(error).__name__}: {first_line(error)}"
                self.notes.append(f"{hypothesis.name} could not be tried on {self.suspect.path or 'the model'}: {said}")
                break
            if cause and all((cause.change, cause.explains) != (other.change, other.explains) for other in found):
                found.append(cause)
        return found

    def judged(self, hypothesis: Hypothesis, variant: Variant) -> Cause | None:
        self.tried += 1
        try:
            values = variant.values()
        except Exception:
            # Torch refuses what the variant would do: then Flax cannot be doing it.
            return None
        if not isinstance(values, Mapping):
            raise TypeError(f"the values of a variant are {type(values).__name__}, not a mapping from places to arrays")
        if isinstance(variant.values, Edited) and not self.suspect.base:
            left = self.suspect.left_of(values)
            self.helpful += [(left, hypothesis.name, variant)] if left < HELPFUL else []
        gone, sound = self.suspect.explained(values, variant.unit)
        if not gone or not sound or (variant.whole and len(gone) < len(values)):
            return None
        what, change = (in_words_of(self.suspect.flax_layer, said) for said in (variant.what, variant.change))
        return Cause(
            *(variant.name or hypothesis.name, self.suspect.path, what, change),
            before=max(self.suspect.before[place] for place in gone),
            after=max(gone.values()),
            explains=tuple(map(str, gone)),
            complete=len(gone) == len(self.suspect.differing),
        )

    def left(self, causes: list[Cause]) -> list[str]:
        """The places that no cause explains."""
        known = {place for cause in causes for place in cause.explains}
        return [str(place) for place in self.suspect.differing if str(place) not in known]
