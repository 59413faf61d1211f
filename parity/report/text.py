"""Results in words, for a terminal."""

import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec

from parity.errors import printable
from parity.said import Said, code_of

if TYPE_CHECKING:
    from parity.evidence.faults import Cause, Diagnosis, FirstOperation, Isolated, Isolation, Spot
    from parity.evidence.result import ArrayDiff, Diff, Divergence, LevelResult, Report, Trace

SIGNS = {"passed": "ok", "failed": "FAILED", "not applicable": "n/a", "not run": "NOT RUN"}
# Findings shown for each level; the rest is in to_dict().
SHOWN = 3
# Characters of a line of code.
CODE = 80
# What a report on a failure may take, and at how many characters its sentences are cut where it would take more.
SCREEN, COLUMNS = 36, 80
CUT = 2 * COLUMNS
LAST = 2
# Notes of a level that stand beside a verdict of agreement too.
TOLD_ANYWAY = ("setting-left-out", "setting-made-good", "gradients-off-ties", "integers-on-ties")


P = ParamSpec("P")


def shown_plainly(text: Callable[P, str]) -> Callable[P, str]:
    """A text for a terminal, without what would write on other places of it."""

    @functools.wraps(text)
    def plain(*args: P.args, **kwargs: P.kwargs) -> str:
        return printable(text(*args, **kwargs))

    return plain


@shown_plainly
def report_text(report: "Report") -> str:
    """One line if all is well; else where the models part, how much, why, and what to do next, on one screen."""
    if report.passed:
        notes = [*left_out(report), *notes_of(report)]
        return "\n".join([headline(report) + not_applicable(report), *(f"  note: {note}" for note in notes)])
    # As much of each section as fits; `to_dict` has all of it.
    faults = report.diagnosis.isolation.faults if report.diagnosis else ()
    sizes = [(shown, full) for shown in range(SHOWN, -1, -1) for full in (True, False)]
    # Of several wrong modules each is named with its cause before the first is told in full.
    sizes = sizes if len(faults) > 1 else sorted(sizes, key=lambda size: not size[1])
    lines: list[str] = []
    for shown, full in sizes:
        lines = failure_lines(report, shown, full)
        if rows(lines) <= SCREEN:
            return "\n".join(lines)
    lines = [line if len(line) <= CUT else f"{line[: CUT - 4]} ..." for line in lines]
    if rows(lines) > SCREEN:
        lines = [line if len(line) <= COLUMNS else f"{line[: COLUMNS - 4]} ..." for line in lines if line]
    # Whatever the models are called: the beginning, and what to do next.
    return "\n".join([*lines[: SCREEN - LAST - 1], "  ...", *lines[-LAST:]] if len(lines) > SCREEN else lines)


def notes_of(report: "Report") -> list[str]:
    """What a reader must know although it decides nothing, and what may go wrong with versions and settings."""
    doubts = [one for one in getattr(report.environment, "warnings", ()) if not one.proof]
    return [*map(str, report.notes), *(f"{one.what}; to mend it: {one.do}" for one in doubts)]


def left_out(report: "Report") -> list[str]:
    """What agreement is not told without: settings that disagree and do not count, and ties that were gone round."""
    notes = (note for level in report.levels for note in level.notes)
    return list(dict.fromkeys(note for note in notes if code_of(note, "") in TOLD_ANYWAY))


def rows(lines: Sequence[str]) -> int:
    """How many lines of a terminal these take."""
    return sum(max(1, -(-len(line) // COLUMNS)) for line in lines)


def failure_lines(report: "Report", shown: int, full: bool = True) -> list[str]:
    """Where, how much, why, and what next; of what there are many, as many as `shown`.

    With 0 even the numbers of a level are left to the first divergence above it; one of all else stays. Unless `full`,
    a wrong module goes without its first operation.
    """
    most = max(1, shown)
    lines = [headline(report), *set_lines(report)]
    divergence = report.trace.first_divergence() if report.trace else None
    if divergence:
        lines += ["", *divergence_lines(divergence)]
    if report.trace and report.trace.unpaired:
        lines.append(unpaired_line(report.trace))
    lines += [""] if len(lines) > 1 else []
    lines += ladder_lines(report, shown)
    agree = modules_agree(report)
    lines += [f"  {agree}"] if agree else []
    lines += why_lines(report.diagnosis, most, full) if report.diagnosis else []
    lines += backward_lines(report.backward, most) if report.backward else []
    notes = notes_of(report)
    lines += [f"  note: {note}" for note in notes[:most]]
    if len(notes) > most:
        lines.append(f"  and {count(len(notes) - most, 'more note')}: to_dict() has them")
    return [*lines, f"  seed {report.seed}", *next_lines(report)]


def modules_agree(report: "Report") -> Said | None:
    """That no module differs although a level failed; None if one does, or none was looked at."""
    failed = any(level.status == "failed" for level in report.levels)
    if not failed or report.trace is None or report.trace.first_divergence():
        return None
    told = f"all {count(len(report.trace.steps), 'module call')} that could be paired agree in float64"
    return Said("modules-agree", f"{told}: look at the levels that failed")


def set_lines(report: "Report") -> list[str]:
    """Which of several input sets differ."""
    if all(one.passed for one in report.sets):
        return []
    wrong = [one.name for one in report.sets if not one.passed]
    right = [one.name for one in report.sets if one.passed]
    told = f"  {len(wrong)} of {count(len(report.sets), 'input set')} fail: {', '.join(wrong)}"
    return [told + (f"; agreeing: {', '.join(right)}" if right else "")]


def ladder_lines(report: "Report", shown: int) -> list[str]:
    """Every level; those that could not run for one reason together."""
    raising = any(level.figures.get("raises") for level in report.levels)
    brief = any(level.level == "identical" and level.status == "failed" for level in report.levels)
    divergence = report.trace is not None and report.trace.first_divergence() is not None
    # Where the numbers stand in another section, a level may go without them.
    seen = divergence or (report.diagnosis is not None and bool(report.diagnosis.isolation.faults))
    stopped = [level for level in report.levels if level.status == "not run"]
    alike: dict[str, list[str]] = {}
    for level in stopped:
        alike.setdefault("one side raises" if raising else level.summary, []).append(level.level)
    lines = []
    for level in report.levels:
        if level.status != "not run":
            below = brief and level.level in ("native", "gradients")
            above = seen and not shown and level.level not in ("weights", "structure")
            lines += level_lines(level, max(1, shown), brief=below or above)
            if (below or above) and not divergence and level.figures.get("atol"):
                lines.append(f"      would pass at atol={level.figures['atol']:.3g}")
    for why, names in alike.items():
        lines.append(f"  {', '.join(names):<10} {SIGNS['not run']:<8} {why}")
    if stopped and not raising:
        lines.append(f"      does not count as passed; {NEXT_OF['not proved']}")
    return lines


# The step behind a verdict that says by itself what to do.
NEXT_OF = {
    "one side raises": Said("mend-what-raises", "mend what raises, or give inputs that both models take"),
    "cannot be paired": Said("name-the-counterparts", "name the counterparts by rename={...}, as in parity.transfer"),
    "outputs differ in structure": Said("return-the-same-tree", "return the same tree on both sides, then compare again"),
    "a setting differs": Said("set-it-alike", "set it alike on both sides, then compare again"),
    "trained otherwise": Said("look-at-training", "look at what the level training names: the models themselves agree"),
    "not proved": Said("name-the-other-levels", "name the other levels in levels=[...] to judge by them alone"),
}


# How Python names the first argument that a function asks for and is not given.
MISSING = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: '(\w+)'")


# What jax raises where Python asks for a number that a compiled program has not yet.
TRACED = ("ConcretizationTypeError", "TracerBoolConversionError", "TracerArrayConversionError", "TracerIntegerConversionError")


def next_step(report: "Report") -> Said | None:
    """The one thing to do; None if there is nothing to do."""
    if report.passed:
        return None
    raises = raised_by_flax(report) if report.verdict == "one side raises" else {}
    if raises.get("error") in TRACED:
        return Said("decide-inside-jit", "let jnp.where or jax.lax.cond decide, not Python: Flax runs as under jax.jit here")
    asked = MISSING.search(raises.get("message", ""))
    if asked:
        first = f"parity.Linen(module, variables, {asked[1]}=...), or give {asked[1]} a default in an nnx.Module"
        return Said("bind-the-argument", f"bind what Flax alone asks for: {first}")
    if report.verdict in NEXT_OF:
        return NEXT_OF[report.verdict]
    if report.diagnosis is None and any(note.code == "recorded" for note in report.notes):
        return Said(
            "compare-both", "parity.compare tells which modules are wrong, and why, where both frameworks are installed"
        )
    if report.diagnosis is None:
        return Said("diagnose", "parity.diagnose tells which modules are wrong, and why")
    if not report.diagnosis.isolation.faults and report.backward and report.backward.faults:
        return Said(
            "look-at-gradients",
            "look in these modules for what stops or changes a gradient: stop_gradient, custom_jvp, custom_vjp, detach",
        )
    if not report.diagnosis.isolation.faults:
        return Said("trace", "parity.trace shows every module in torch's order")
    if report.diagnosis.causes:
        return Said("make-the-change", "make the change, then compare again")
    return Said("look-at-the-code", "look at the code of these modules")


def next_lines(report: "Report") -> list[str]:
    """The one thing to do, as the last line."""
    step = next_step(report)
    # Beside levels that could not run stands already what to do.
    return [] if step is None or report.verdict == "not proved" else [f"  next: {step}"]


def why_lines(diagnosis: "Diagnosis", shown: int = SHOWN, full: bool = True) -> list[str]:
    """The modules that are wrong for themselves, each with its likeliest cause."""
    faults = diagnosis.isolation.faults
    if not faults:
        return []
    lines = ["", wrong_modules(diagnosis.isolation)]
    told = [f"  note: {note}" for note in diagnosis.notes[:1]]
    for one in faults[:shown]:
        where = ", in its own code between the modules that it calls" if one.between else ""
        times = "" if one.ratio == float("inf") else f"   {one.ratio:.3g} times what rounding explains"
        lines.append(f"  {one.path or 'the model'}{times}{where}")
        causes = diagnosis.causes_of(one.path)
        lines += [f"    {line.strip()}" for line in cause_lines(causes[:1])]
        if len(causes) > 1:
            lines.append(f"    {count(len(causes) - 1, 'other cause')} would explain it too: parity.diagnose tells them")
        lines += [
            f"    {found.where}" + (f": {found.reason}" if found.reason else "") for found in one.differences[:1] if not causes
        ]
        lines += [f"  {line}" for line in operation_lines(one.operation)] if full else []
    return [*lines, *([f"  and {len(faults) - shown} more: parity.diagnose tells them"] if len(faults) > shown else []), *told]


def backward_lines(isolation: "Isolation", shown: int = SHOWN) -> list[str]:
    """The modules that are wrong backwards, each run alone."""
    if not isolation.faults:
        return []
    modules = count(len({one.path for one in isolation.modules}), "module")
    wrong = count(len(isolation.faults), "module")
    lines = ["", f"{wrong} of {modules} wrong backwards, each run alone on what torch's was given and what came back to it"]
    lines += [f"  {backward_line(one)}" for one in isolation.faults[:shown]]
    more = len(isolation.faults) - shown
    return lines + ([f"  and {more} more: report.backward"] if more > 0 else [])


def backward_line(one: "Isolated") -> str:
    """A module that is wrong backwards."""
    own = ", in its own code between the modules that it calls" if one.between else ""
    return f"{one.path or 'the model'}   {one.differences[0].where}: {one.ratio:.3g} times what rounding explains{own}"


def headline(report: "Report") -> str:
    """The verdict, no wider than what was climbed."""
    passed = [level.level for level in report.levels if level.passed]
    on = f" on the inputs {report.inputs!r}" if report.inputs and not report.passed else ""
    sets = f", {count(len(report.sets), 'input set')}" if report.sets else ""
    identical = [level.figures for level in report.levels if level.level == "identical"]
    elements = sum(figures.get("elements", 0) + figures.get("whole numbers", 0) for figures in identical)
    return {
        "same": f"the same function: {', '.join(passed)} ({elements:,} values identical{sets})",
        "agrees as asked": f"agree on what was asked, which is less than the same function: {', '.join(passed)}{sets}",
        "not proved": f"not proved: a level could not run{on}",
        "a setting differs": "the same numbers on these inputs, but a setting differs",
        "trained otherwise": "the same function, which is NOT trained the same",
        "cannot be paired": "NOT the same function: they cannot be paired, no parameter has a counterpart",
        "one side raises": f"NOT the same function: {raising(report)}{on}",
        "outputs differ in structure": f"NOT the same function: the outputs differ in structure{on}",
        "differs": f"NOT the same function{on}",
    }[report.verdict]


def raised_by_flax(report: "Report") -> dict[str, str]:
    """What Flax raises where torch does not: its class and its message; nothing if it does not."""
    findings = [finding for level in report.levels for finding in level.findings]
    return next((dict(one.figures) for one in findings if one.figures.get("raises") == "flax"), {})


def raising(report: "Report") -> str:
    """Which side raises."""
    side = next((level.figures["raises"] for level in report.levels if "raises" in level.figures), "")
    return "torch raises, Flax does not" if side == "torch" else "Flax raises, torch does not"


def not_applicable(report: "Report") -> str:
    """The levels that say nothing about these models, behind the verdict."""
    found = [f"{level.level} does not apply, {level.summary}" for level in report.levels if level.status == "not applicable"]
    return "".join(f"; {one}" for one in found)


def level_lines(level: "LevelResult", shown: int = SHOWN, brief: bool = False) -> list[str]:
    """A level with its worst findings; without them where another level already shows the cause."""
    lines = [f"  {level.level:<10} {SIGNS[level.status]:<8} {level.summary}"]
    for finding in () if brief else level.findings[:shown]:
        lines.append(f"      {finding.where + ': ' if finding.where else ''}{finding.what}")
    if len(level.findings) > shown and not brief:
        lines.append(f"      and {len(level.findings) - shown} more")
    notes = [note for note in level.notes if code_of(note, "") != "dtype-not-refused"]
    return lines + [f"      note: {note}" for note in notes[:shown]]


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def divergence_lines(found: "Divergence") -> list[str]:
    """Where, how much, in which code to look, and by what tolerance it would have passed."""
    path = (found.path or "the model") + (f", call {found.call + 1}" if found.call else "")
    last = (
        f"last agreement: {found.last_agreement or 'the model'}" if found.last_agreement is not None else "no module before it"
    )
    lines = [f"{path}   first divergence   ({last})", *divergence_figures(found)]
    side = side_of_fault(found)
    lines += [f"  {side}"] if side else []
    if found.between:
        lines.append(f"  in between torch ran {', '.join(found.between)}, which Flax has not as a module")
    return lines if found.reason else [*lines, f"  would pass at atol={found.atol:.3g}"]


def side_of_fault(found: "Divergence") -> Said | None:
    """Whether the fault lies in the module or in the code before it; None if that could not be told."""
    if found.inputs == "agree":
        return Said("fault-in-module", "what it is given is the same on both sides: the fault is in it")
    if found.inputs == "differ":
        since = f"after {found.last_agreement}" if found.last_agreement else "before it"
        text = f"what it is given differs already: the fault is in the code {since} that leads to it"
        return Said("fault-before-module", text)
    return None


def divergence_figures(found: "Divergence") -> list[str]:
    """How much the outputs of a module differ."""
    if found.reason:
        return [f"  {found.output + ': ' if found.output else ''}{found.reason}"]
    output = f"output {found.output}: " if found.output else ""
    return [
        f"  {output}{found.differing} of {found.elements} values differ; {found.ratio:.3g} times what rounding explains",
        f"  worst at {found.worst}: expected (torch) {found.torch:.6g}, actual (flax) {found.flax:.6g}, "
        f"difference {found.difference:.3g}",
    ]


def unpaired_line(trace: "Trace") -> str:
    shown = ", ".join(trace.unpaired[:SHOWN])
    more = f" and {len(trace.unpaired) - SHOWN} more" if len(trace.unpaired) > SHOWN else ""
    return f"  not paired, so not looked into: {shown}{more}"


@shown_plainly
def trace_text(trace: "Trace") -> str:
    """The first divergence, or that there is none."""
    found = trace.first_divergence()
    agreeing = count(sum(step.agrees for step in trace.steps), "module call")
    lines = divergence_lines(found) if found else [f"no divergence in {agreeing}"]
    return "\n".join([*lines, unpaired_line(trace)] if trace.unpaired else lines)


@shown_plainly
def isolation_text(isolation: "Isolation") -> str:
    """Each wrong module with what it computes otherwise; what could not be told, and why."""
    lines = [wrong_modules(isolation)]
    for one in isolation.faults:
        lines += isolated_lines(one)
    for one in dict.fromkeys(i for i in isolation.modules if i.status in ("follows", "not comparable")):
        lines.append(f"  {one.path or 'the model'}: {'not told' if one.status == 'follows' else 'not compared'}, {one.note}")
    return "\n".join([*lines, *([f"  not paired: {', '.join(isolation.unpaired)}"] if isolation.unpaired else [])])


def wrong_modules(isolation: "Isolation") -> str:
    """How many modules are wrong, of how many, and by what."""
    modules = count(len({one.path for one in isolation.modules}), "module")
    said = f"{count(len(isolation.faults), 'wrong module')} of {modules}, each run alone on what torch's was given"
    return (
        said
        if isolation.dtype == "float64" or not isolation.faults
        else f"{said}: the same in float64, not in {isolation.dtype}"
    )


def isolated_lines(one: "Isolated") -> list[str]:
    """A wrong module, with its worst differences."""
    path = (one.path or "the model") + (f", call {one.call + 1}" if one.call else "")
    own = ": the fault is in its own code, between the modules that it calls" if one.between else ""
    lines = [f"{path}   differs, alone{own}"]
    for found in one.differences[:SHOWN]:
        if found.reason:
            lines.append(f"  {found.where}: {found.reason}")
            continue
        times = f"; {found.ratio:.3g} times what rounding explains" if found.ratio != float("inf") else ""
        lines.append(
            f"  {found.where}: {found.differing} of {found.elements} values differ{times}; "
            f"expected (torch) {found.torch:.6g}, actual (flax) {found.flax:.6g} at {found.worst}"
        )
    if len(one.differences) > SHOWN:
        lines.append(f"  and {len(one.differences) - SHOWN} more")
    return [*lines, *([f"  {one.note}"] if one.note else []), *operation_lines(one.operation)]


def operation_lines(found: "FirstOperation | None") -> list[str]:
    """The first operation that differs, with the line of the user's code on each side; or why none can be named."""
    if found is None:
        return []
    if found.torch is None or found.flax is None:
        return [f"  no operation is named: {found.note}"]
    note = f" ({found.note})" if found.note else ""
    return [
        f"  first operation that differs{note}",
        f"    expected (torch) {spot_text(found.torch)}",
        f"    actual (flax)    {spot_text(found.flax)}",
    ]


def spot_text(spot: "Spot") -> str:
    """An operation with its line."""
    name = f"{spot.operation} in {spot.within}" if spot.within else spot.operation or "as it is"
    if spot.source is None:
        return f"{name}, in a layer that no code of yours calls"
    text = spot.source.text if len(spot.source.text) <= CODE else spot.source.text[: CODE - 3] + "..."
    return f"{name}, {short(spot.source.file)}:{spot.source.line}" + (f"  {text}" if text else "")


def short(file: str) -> str:
    """A path as it is seen from the working directory, or the last two parts of it."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here) if file.startswith(here) else os.sep.join(file.split(os.sep)[-2:])


@shown_plainly
def diagnosis_text(diagnosis: "Diagnosis") -> str:
    """Each wrong module with what explains it."""
    isolation = diagnosis.isolation
    settings = [f"  a setting differs: {sentence}" for sentence in diagnosis.settings]
    if not isolation.faults:
        return "\n".join([isolation_text(isolation), *settings])
    lines = [wrong_modules(isolation)]
    for one in isolation.faults:
        lines += [*isolated_lines(one), *cause_lines(diagnosis.causes_of(one.path))]
    lines += [f"  no known cause: {sentence}" for sentence in diagnosis.unexplained]
    lines += [*settings, *(f"  note: {note}" for note in diagnosis.notes)]
    return "\n".join([*lines, *([f"  not paired: {', '.join(isolation.unpaired)}"] if isolation.unpaired else [])])


def cause_lines(causes: "Sequence[Cause]") -> list[str]:
    """The causes of one module, best first."""
    lines = []
    for number, cause in enumerate(causes[:SHOWN]):
        word = "cause" if number == 0 else "or"
        lines += [
            f"  {word}: {cause.hypothesis}. {cause.what}",
            f"    {fall(cause)}{extent(cause)}",
            f"    change: {cause.change}",
        ]
    return lines


def fall(cause: "Cause") -> str:
    """The evidence for a cause."""
    if cause.before == float("inf"):
        return f"if torch does the same, {cause.after:.2g} times what rounding explains is left of the difference"
    figures = f"from {cause.before:.3g} to {cause.after:.2g} times what rounding explains"
    return f"if {'torch does the same' if cause.tried_on == 'torch' else 'Flax does as torch'}, the difference falls {figures}"


def extent(cause: "Cause") -> str:
    """How much of what differs in the module a cause explains, where that is not all."""
    places = ", ".join(cause.explains[:SHOWN]) + (f" and {len(cause.explains) - SHOWN} more" if cause.explains[SHOWN:] else "")
    return "" if cause.complete else f"; it explains {places} alone, not all that differs"


@shown_plainly
def diff_text(diff: "Diff") -> str:
    """The leaves that differ, worst first; one line if none does."""
    wrong = sorted((leaf for leaf in diff.leaves if not leaf.agrees), key=lambda leaf: -leaf.difference)
    elements = sum(leaf.elements for leaf in diff.leaves)
    if not wrong:
        return f"no difference: {count(len(diff.leaves), 'array')}, {count(elements, 'value')}"
    lines = [f"{len(wrong)} of {len(diff.leaves)} arrays differ"]
    for leaf in wrong[:SHOWN]:
        lines += leaf_lines(leaf)
    if len(wrong) > SHOWN:
        lines.append(f"  and {len(wrong) - SHOWN} more")
    return "\n".join(lines)


def leaf_lines(leaf: "ArrayDiff") -> list[str]:
    name = leaf.path or "the array"
    if not leaf.differing:
        return [f"  {name}: {leaf.reason}"]
    # Beyond a million the distance says no more than that the values are others.
    ulp = f", at most {leaf.ulp} ulp near the scale" if leaf.ulp is not None and leaf.ulp < 10**6 else ""
    lines = [
        f"  {name}: {leaf.reason}, {leaf.differing} of {leaf.elements}",
        f"    worst at {leaf.worst}: actual {leaf.actual!r}, expected {leaf.expected!r}, "
        f"largest difference {leaf.difference:.3g}{ulp}",
    ]
    if leaf.atol is not None:
        lines.append(f"    would pass at atol={leaf.atol:.3g}")
    return lines
