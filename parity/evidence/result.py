"""What a comparison returns: frozen values that can print themselves."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from parity.errors import DivergenceError, InputError
from parity.evidence.faults import Diagnosis, Isolation
from parity.evidence.notes import Note
from parity.evidence.pictures import Picture
from parity.evidence.verdicts import verdict_of

if TYPE_CHECKING:
    from parity.training.outcome import Training
    from parity.weights.transfer import Transfer

Status = Literal["passed", "failed", "not applicable", "not run"]

LEVELS = ("weights", "structure", "wiring", "identical", "native", "gradients")
# The level that needs an optimizer, a loss and a number of steps besides.
TRAINING = "training"
# What each level shows, for people.
PROVES = {
    "weights": "the parameters, ties and settings are the same",
    "structure": "outputs have the same tree, shapes, dtypes, NaN and infinity positions; bad input is refused alike",
    "wiring": "heads, axes, masks, transposes and order are right: bit-equal in float32 where every sum is exact",
    "identical": "the functions are identical: computed in float64 and rounded once, bit-equal in float32",
    "native": "no precision is lost in the deployed dtype, eager and compiled",
    "gradients": "training starts the same: gradients of parameters and inputs agree",
    "training": "training stays the same: parameters, running statistics and loss, step by step with torch's dropout masks",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or that a reader must know.

    Attributes:
        where: path of a leaf, an output or an input.
        what: one sentence.
        figures: the numbers behind it.
    """

    where: str
    what: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LevelResult:
    """One level of the ladder.

    Attributes:
        level: its name.
        status: a level that could not run is neither passed nor failed.
        summary: the figures in a few words, or why it did not run.
        figures: numbers by name.
        findings: what failed, worst first.
        notes: what a reader must know although the level passed.
    """

    level: str
    status: Status
    summary: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.status == "passed"


@dataclass(frozen=True)
class Divergence:
    """The first place at which two models part.

    Attributes:
        path: of the module, in torch's words; '' is the model itself.
        call: which call of it, from 0.
        output: path of the output in what the module returns.
        last_agreement: the module that finished before it and agreed, None if there is none.
        differing: how many values differ, and `elements`, of how many.
        ratio: the largest difference over what rounding explains.
        worst: index of the largest difference.
        flax: the value there.
        torch: the value there.
        difference: between them.
        reason: in words, where it is no matter of numbers: a shape, a missing output, NaN.
        atol: the smallest absolute tolerance that would have passed.
        inputs: `agree` if what the module is given is the same on both sides, so that the fault is in
            it; `differ` if the fault lies in the code before it; '' if that could not be told.
        between: torch modules without a counterpart that ran since the last agreement.
    """

    path: str
    call: int
    output: str
    last_agreement: str | None
    differing: int = 0
    elements: int = 0
    ratio: float = 0.0
    worst: tuple[int, ...] = ()
    flax: float = 0.0
    torch: float = 0.0
    difference: float = 0.0
    reason: str = ""
    atol: float | None = None
    inputs: Literal["agree", "differ", ""] = ""
    between: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One module's output on both sides.

    Attributes:
        path: of the module, in torch's words.
        call: which call of it, from 0.
        agrees: whether every output does.
        ratio: the largest difference over what rounding explains.
        divergence: what differs, None if nothing does.
        note: why it could not be compared, '' if it was.
        pictures: how the difference lies in each output, for reports that draw.
    """

    path: str
    call: int
    agrees: bool
    ratio: float = 0.0
    divergence: Divergence | None = None
    note: str = ""
    pictures: tuple[Picture, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Trace:
    """Outputs of every module on both sides, in the order in which torch finished them.

    Attributes:
        steps: one for each call of each torch module.
        unpaired: modules of one side without a counterpart that was called.
        isolate: runs every pair alone, for `isolated`.
    """

    steps: tuple[Step, ...]
    unpaired: tuple[str, ...] = ()
    isolate: Callable[[], Isolation] | None = field(default=None, compare=False, repr=False)

    @property
    def passed(self) -> bool:
        """Whether every module that could be paired agrees."""
        return all(step.agrees for step in self.steps)

    def first_divergence(self) -> Divergence | None:
        """The first module whose output differs, with the last agreement before it; None if all agree."""
        return next((step.divergence for step in self.steps if step.divergence), None)

    def isolated(self) -> Isolation:
        """Every pair of modules run alone on what torch's was given: each wrong one, and none for its neighbour.

        Raises:
            InputError: the trace was made by hand, without models to run.
        """
        if self.isolate is None:
            raise InputError("this trace holds no models to run; take one from parity.trace")
        return self.isolate()

    def raise_for_divergence(self) -> None:
        """Raise the first divergence, if there is one.

        Raises:
            DivergenceError: a module's output differs.
        """
        if not self.passed:
            raise DivergenceError(str(self))

    def __str__(self) -> str:
        from parity.report.text import trace_text

        return trace_text(self)

    def _repr_html_(self) -> str | None:
        from parity.report.html import fragment

        return fragment(self)

    def to_dict(self) -> dict[str, Any]:
        """The result for machines."""
        from parity.report.data import document

        return document("trace", self)


@dataclass(frozen=True)
class SetResult:
    """What came of one of several input sets.

    Attributes:
        name: of the set.
        shows: what it can show.
        passed: whether no level failed or could not run.
        failed: levels that failed or could not run.
        verdict: as in a report.
    """

    name: str
    shows: str
    passed: bool
    failed: tuple[str, ...]
    verdict: str


@dataclass(frozen=True)
class Report:
    """The ladder climbed for one pair of models.

    Attributes:
        levels: in the order of the ladder.
        trace: where the models part; None if they do not, or if no trace could be made.
        environment: versions, devices, and what was pinned while comparing.
        seed: of probes, cotangents and jitter.
        notes: what concerns all levels, such as inputs that cannot show a fault.
        inputs: name of the input set that levels, trace and diagnosis are about; '' for plain arguments, and
            where several sets agree.
        sets: what came of each input set, where there are several.
        diagnosis: which modules are wrong for themselves, and why; None if all is well, or it was not asked for.
        transfer: how the parameters of the two correspond; None if they could not be paired.
        backward: every pair of modules run alone backwards, where gradients differ though outputs agree; None else.
        training: step by step, how far the two part while they train; None if they were not trained.
    """

    levels: tuple[LevelResult, ...]
    trace: Trace | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    notes: tuple[Note, ...] = ()
    diagnosis: Diagnosis | None = None
    inputs: str = ""
    sets: tuple[SetResult, ...] = ()
    backward: Isolation | None = None
    training: "Training | None" = None
    transfer: "Transfer | None" = field(default=None, repr=False)

    @property
    def verdict(self) -> str:
        """One of `parity.VERDICTS`."""
        return verdict_of(self)

    @property
    def passed(self) -> bool:
        """Whether every level passed or does not apply. A level that could not run does not count as passed."""
        ran = [level for level in self.levels if level.status != "not applicable"]
        return bool(ran) and all(level.passed for level in ran)

    def level(self, name: str) -> LevelResult:
        """One level by its name.

        Raises:
            KeyError: it was not asked for.
        """
        for result in self.levels:
            if result.level == name:
                return result
        raise KeyError(f"level {name!r} was not asked for; this report has {', '.join(r.level for r in self.levels)}")

    def raise_for_divergence(self) -> None:
        """Raise the report, unless every level passed or does not apply.

        Raises:
            DivergenceError: a level failed or could not run.
        """
        if not self.passed:
            raise DivergenceError(str(self))

    def __str__(self) -> str:
        from parity.report.text import report_text

        return report_text(self)

    def text(self, environment: bool = False) -> str:
        """The report in words; with versions, devices and settings below it where they are asked for."""
        from parity.report.environment import fact_lines

        return "\n".join([str(self), *(["", *fact_lines(self.environment)] if environment else [])])

    def _repr_html_(self) -> str | None:
        from parity.report.html import fragment

        return fragment(self)

    def save_html(self, path: str | os.PathLike[str], title: str = "") -> Path:
        """Write the report as one page that needs no network: levels, wrong modules, the model as a tree with pictures.

        Args:
            path: of the page; an existing one is replaced, once the new one is whole.
            title: above the verdict, such as the names of the two models.

        Returns:
            The path.

        Raises:
            InputError: the packages that draw are not installed, or the page cannot be written.
        """
        from parity.report.html import save_report

        return save_report(self, path, title)

    def to_dict(self) -> dict[str, Any]:
        """The result for machines."""
        from parity.report.data import document

        return document("report", self)

    def for_machines(self) -> dict[str, Any]:
        """What scripts need besides the fields: the verdict in one word and in one line, and every sentence with its code."""
        from parity.report.data import hints
        from parity.report.text import headline

        return {"verdict": self.verdict, "headline": headline(self), "hints": hints(self)}


@dataclass(frozen=True)
class ArrayDiff:
    """Two arrays under one path.

    Attributes:
        path: in the tree; '' for a lone array.
        agrees: whether they do.
        reason: why not, in words; '' if they agree.
        differing: how many values differ beyond the tolerance, and `elements`, of how many.
        worst: index of the largest difference.
        actual: the value there.
        expected: the value there.
        difference: the largest.
        ulp: the largest distance in representable numbers among values near the scale; None for integers.
        scaled: the largest difference over `u * max|expected|`.
        atol: the smallest absolute tolerance that would have passed.
    """

    path: str
    agrees: bool
    reason: str = ""
    differing: int = 0
    elements: int = 0
    worst: tuple[int, ...] = ()
    actual: Any = None
    expected: Any = None
    difference: float = 0.0
    ulp: int | None = None
    scaled: float = 0.0
    atol: float | None = None


@dataclass(frozen=True)
class Diff:
    """Two arrays or trees of arrays, leaf by leaf.

    Attributes:
        leaves: in the order of `expected`.
    """

    leaves: tuple[ArrayDiff, ...]

    @property
    def passed(self) -> bool:
        """Whether every leaf agrees."""
        return all(leaf.agrees for leaf in self.leaves)

    def raise_for_divergence(self) -> None:
        """Raise what differs, if anything does.

        Raises:
            DivergenceError: a leaf differs.
        """
        if not self.passed:
            raise DivergenceError(str(self))

    def __str__(self) -> str:
        from parity.report.text import diff_text

        return diff_text(self)

    def _repr_html_(self) -> str | None:
        from parity.report.html import fragment

        return fragment(self)

    def to_dict(self) -> dict[str, Any]:
        """The result for machines."""
        from parity.report.data import document

        return document("diff", self)
