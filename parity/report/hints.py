"""What a result tells besides its figures: each sentence with its code, in the words of the text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from parity.report import text
from parity.report.plan import coded_sentences
from parity.said import code_of

if TYPE_CHECKING:
    from parity.evidence.faults import Cause, Diagnosis, Isolation
    from parity.evidence.result import LevelResult, Report, Trace
    from parity.evidence.rule_check import RuleCheck
    from parity.training.outcome import Training
    from parity.weights.transfer import Transfer

Kind = Literal["hint", "note", "cause", "environment", "next"]
# What a level says that neither passed nor failed for its own sake.
OF_STATUS = {"failed": "level-failed", "not run": "level-not-run", "not applicable": "level-not-applicable"}


@dataclass(frozen=True)
class Hint:
    """One sentence of a result.

    Attributes:
        kind: whose code it is: a table of `parity.codes`.
        code: stays the same from version to version, where the sentence may not.
        text: the sentence, as people read it.
        where: the level, module, leaf or argument that it is about; '' for the whole.
        do: what to do about it; '' if the sentence says so itself, or nothing is to be done.
    """

    kind: Kind
    code: str
    text: str
    where: str = ""
    do: str = ""


def hints_of(result: Any) -> tuple[Hint, ...]:
    """The hints of any result, those of what it holds included; none for what has none."""
    return tuple(FOUND_IN[type(result).__name__](result)) if type(result).__name__ in FOUND_IN else ()


def of_report(report: "Report") -> Iterator[Hint]:
    """The hints of a comparison, in the order of its text."""
    if report.trace:
        yield from of_trace(report.trace)
    for level in report.levels:
        yield from of_level(level)
    agree = text.modules_agree(report)
    if agree:
        yield Hint("hint", agree.code, agree)
    if report.diagnosis:
        yield from of_diagnosis(report.diagnosis)
    for one in report.backward.faults if report.backward else ():
        yield Hint("hint", "wrong-backwards", text.backward_line(one), one.path)
    if report.training:
        yield from of_training(report.training)
    yield from (Hint("note", note.code, str(note), note.where) for note in report.notes)
    yield from of_environment(report.environment)
    step = text.next_step(report)
    if step:
        yield Hint("next", step.code, step)


def of_level(level: "LevelResult") -> Iterator[Hint]:
    """What a level says, unless it passed; then its notes."""
    if level.status in OF_STATUS:
        yield Hint("hint", OF_STATUS[level.status], level.summary, level.level)
    for one in level.findings:
        code = "setting-differs" if one.figures.get("setting") else "finding"
        yield Hint("hint", code, one.what, one.where or level.level)
    yield from (Hint("hint", code_of(note, "level-note"), note, level.level) for note in level.notes)


def of_trace(trace: "Trace") -> Iterator[Hint]:
    """In which code to look, and into what nobody has looked."""
    found = trace.first_divergence()
    side = text.side_of_fault(found) if found else None
    if found and side:
        yield Hint("hint", side.code, side, found.path)
    yield from (Hint("hint", "not-paired", sentence) for sentence in trace.unpaired)
    yield from (Hint("hint", code_of(step.note, "not-compared"), step.note, step.path) for step in trace.steps if step.note)


def of_isolation(isolation: "Isolation") -> Iterator[Hint]:
    """The wrong modules, and what could not be told of others."""
    for one in isolation.faults:
        yield Hint("hint", "wrong-module", text.isolated_lines(one)[0], one.path)
        if one.operation and (one.operation.torch is None or one.operation.flax is None):
            yield Hint("hint", "no-operation", one.operation.note, one.path)
    for one in isolation.modules:
        if one.note:
            code = {"follows": "follows", "not comparable": "not-compared"}.get(one.status, "module-note")
            yield Hint("hint", code_of(one.note, code), one.note, one.path)
    yield from (Hint("hint", "not-paired", sentence) for sentence in isolation.unpaired)


def of_diagnosis(diagnosis: "Diagnosis") -> Iterator[Hint]:
    """The wrong modules with their causes, and what has none."""
    yield from of_isolation(diagnosis.isolation)
    yield from map(of_cause, diagnosis.causes)
    yield from (Hint("hint", "no-known-cause", sentence) for sentence in diagnosis.unexplained)
    yield from (Hint("hint", "setting-differs", sentence) for sentence in diagnosis.settings)
    yield from (Hint("hint", code_of(note, "cause-not-tried"), note) for note in diagnosis.notes)


def of_cause(cause: "Cause") -> Hint:
    """What would explain a difference; two causes at once have both codes, joined by ' and '."""
    return Hint("cause", cause.hypothesis, f"{cause.what}. {text.fall(cause)}{text.extent(cause)}", cause.path, cause.change)


def of_training(training: "Training") -> Iterator[Hint]:
    """Where two runs part, and what of them was not compared."""
    from parity.report.training import first_lines

    if training.dropout:
        yield Hint("hint", "masks-not-replayed", training.dropout)
    elif not training.passed:
        yield Hint("hint", "trained-apart", " ".join(line.strip() for line in first_lines(training)))
    yield from map(of_cause, training.causes)
    for name, count in training.noise:
        yield Hint("hint", "rounding-gradient", f"{count} values of the gradient are rounding alone, not compared", name)
    yield from (Hint("hint", "without-gradient", "without gradient, left alone", name) for name in training.unused)
    yield from (Hint("hint", code_of(note, "training-note"), note) for note in training.notes)


def of_transfer(transfer: "Transfer") -> Iterator[Hint]:
    """What a reader must know of a transfer, and what stands in its way."""
    yield from (Hint("hint", said.code, said) for said in coded_sentences(transfer))
    yield from (Hint("hint", "not-in-both", one.reason, one.path) for one in transfer.unpaired)
    yield from (Hint("hint", code_of(problem, "refused"), problem) for problem in transfer.problems)


def of_rule_check(check: "RuleCheck") -> Iterator[Hint]:
    """What does not come back as it was, and what the comparison tells."""
    yield from (Hint("hint", "refused", problem, check.rule) for problem in check.problems)
    yield from of_report(check.report) if check.report else ()


def of_environment(environment: Any) -> Iterator[Hint]:
    """What is known to go wrong with the versions and settings of a process."""
    for one in getattr(environment, "warnings", ()):
        yield Hint("environment", one.code, one.what, do=one.do)


def of_suite(suite: Any) -> Iterator[Hint]:
    """What a whole run tells besides its cases: each of those has its own."""
    for case in suite.cases:
        if case.skipped:
            yield Hint("hint", "skipped", case.skipped, case.name)
        elif case.refused:
            yield Hint("hint", "refused-alike", "refused by both sides, as it must be", case.name)
    yield from of_environment(suite.environment)


FOUND_IN: dict[str, Any] = {
    "Report": of_report,
    "Trace": of_trace,
    "Isolation": of_isolation,
    "Diagnosis": of_diagnosis,
    "Training": of_training,
    "Transfer": of_transfer,
    "Environment": of_environment,
    "SuiteResult": of_suite,
    "RuleCheck": of_rule_check,
}
