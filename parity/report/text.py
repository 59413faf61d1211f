"""Results in words, for a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parity.evidence.faults import Cause, Diagnosis, Isolated, Isolation
    from parity.evidence.result import ArrayDiff, Diff, Divergence, LevelResult, Report, Trace

SIGNS = {"passed": "ok", "failed": "FAILED", "not applicable": "n/a", "not run": "NOT RUN"}
# Findings shown for each level; the rest is in to_dict().
SHOWN = 3
WIDTH = 60


def report_text(report: "Report") -> str:
    """One line if all is well; else the verdict, where the models part, and the ladder."""
    if report.passed:
        return "\n".join([headline(report), *not_applicable(report), *(f"  note: {note}" for note in report.notes)])
    lines = [headline(report)]
    divergence = report.trace.first_divergence() if report.trace else None
    if divergence:
        lines += ["", *divergence_lines(divergence)]
    if report.trace and report.trace.unpaired:
        lines.append(unpaired_line(report.trace))
    lines += why_lines(report.diagnosis) if report.diagnosis else []
    lines += backward_lines(report.backward) if report.backward else []
    lines += [""] if len(lines) > 1 else []
    identical_failed = any(level.level == "identical" and level.status == "failed" for level in report.levels)
    for level in report.levels:
        lines += level_lines(level, brief=identical_failed and level.level in ("native", "gradients"))
    if report.trace and not divergence and any(level.status == "failed" for level in report.levels):
        compared = len(report.trace.steps)
        lines.append(
            f"  all {count(compared, 'module call')} that could be paired agree in float64: look at the levels that failed"
        )
    return "\n".join([*lines, *(f"  note: {note}" for note in report.notes), f"  seed {report.seed}"])


def why_lines(diagnosis: "Diagnosis") -> list[str]:
    """The modules that are wrong for themselves, each with its likeliest cause; what to do next."""
    faults = diagnosis.isolation.faults
    if not faults:
        return []
    lines = ["", wrong_modules(diagnosis.isolation)]
    for one in faults[:SHOWN]:
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
    lines += [f"  and {len(faults) - SHOWN} more: parity.diagnose tells them"] if len(faults) > SHOWN else []
    return [
        *lines,
        "  next: make the change, then compare again" if diagnosis.causes else "  next: look at the code of these modules",
    ]


def backward_lines(isolation: "Isolation") -> list[str]:
    """The modules that are wrong backwards, each run alone."""
    if not isolation.faults:
        return []
    modules = count(len({one.path for one in isolation.modules}), "module")
    wrong = count(len(isolation.faults), "module")
    lines = ["", f"{wrong} of {modules} wrong backwards, each run alone on what torch's was given and what came back to it"]
    for one in isolation.faults[:SHOWN]:
        own = ", in its own code between the modules that it calls" if one.between else ""
        lines.append(
            f"  {one.path or 'the model'}   {one.differences[0].where}: {one.ratio:.3g} times what rounding explains{own}"
        )
    return lines + ([f"  and {len(isolation.faults) - SHOWN} more: report.backward"] if len(isolation.faults) > SHOWN else [])


def headline(report: "Report") -> str:
    """The verdict, no wider than what was climbed."""
    passed = [level.level for level in report.levels if level.passed]
    failed = [level for level in report.levels if level.status == "failed"]
    if report.passed:
        elements = sum(level.figures.get("elements", 0) for level in report.levels if level.level == "identical")
        if "identical" in passed:
            return f"the same function: {', '.join(passed)} ({elements:,} values identical)"
        return f"agree on what was asked, which is less than the same function: {', '.join(passed)}"
    if not failed:
        return "not proved: a level could not run"
    if [level.level for level in failed] == ["training"] and "identical" in passed:
        return "the same function, which is NOT trained the same"
    only_settings = all(level.level == "weights" and all(f.figures.get("setting") for f in level.findings) for level in failed)
    if only_settings and "identical" in passed:
        return "the same numbers on these inputs, but a setting differs"
    return "NOT the same function"


def not_applicable(report: "Report") -> list[str]:
    return [f"  {level.level}: not applicable, {level.summary}" for level in report.levels if level.status == "not applicable"]


def level_lines(level: "LevelResult", brief: bool = False) -> list[str]:
    """A level with its worst findings; without them where another level already shows the cause."""
    lines = [f"  {level.level:<10} {SIGNS[level.status]:<8} {level.summary}"]
    if level.status == "not run":
        return [*lines, "      does not count as passed; name the other levels in levels=[...] to judge by them alone"]
    for finding in () if brief else level.findings[:SHOWN]:
        lines.append(f"      {finding.where + ': ' if finding.where else ''}{finding.what}")
    if len(level.findings) > SHOWN and not brief:
        lines.append(f"      and {len(level.findings) - SHOWN} more")
    return lines + [f"      note: {note}" for note in level.notes if not note.startswith("also tried")]


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def divergence_lines(found: "Divergence") -> list[str]:
    """Where, how much, in which code to look, and by what tolerance it would have passed."""
    path = (found.path or "the model") + (f", call {found.call + 1}" if found.call else "")
    last = (
        f"last agreement: {found.last_agreement or 'the model'}" if found.last_agreement is not None else "no module before it"
    )
    lines = [f"{path}   first divergence   ({last})"]
    if found.reason:
        lines.append(f"  {found.output + ': ' if found.output else ''}{found.reason}")
    else:
        output = f"output {found.output}: " if found.output else ""
        lines.append(
            f"  {output}{found.differing} of {found.elements} values differ; {found.ratio:.3g} times what rounding explains"
        )
        lines.append(
            f"  worst at {found.worst}: expected (torch) {found.torch:.6g}, actual (flax) {found.flax:.6g}, "
            f"difference {found.difference:.3g}"
        )
    if found.inputs == "agree":
        lines.append("  what it is given is the same on both sides: the fault is in it")
    elif found.inputs == "differ":
        since = f"after {found.last_agreement}" if found.last_agreement else "before it"
        lines.append(f"  what it is given differs already: the fault is in the code {since} that leads to it")
    if found.between:
        lines.append(f"  in between torch ran {', '.join(found.between)}, which Flax has not as a module")
    return lines if found.reason else [*lines, f"  would pass at atol={found.atol:.3g}"]


def unpaired_line(trace: "Trace") -> str:
    shown = ", ".join(trace.unpaired[:SHOWN])
    more = f" and {len(trace.unpaired) - SHOWN} more" if len(trace.unpaired) > SHOWN else ""
    return f"  not paired, so not looked into: {shown}{more}"


def trace_text(trace: "Trace") -> str:
    """The first divergence, or that there is none."""
    found = trace.first_divergence()
    agreeing = count(sum(step.agrees for step in trace.steps), "module call")
    lines = divergence_lines(found) if found else [f"no divergence in {agreeing}"]
    return "\n".join([*lines, unpaired_line(trace)] if trace.unpaired else lines)


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
    return [*lines, f"  {one.note}"] if one.note else lines


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
        fall = f"the difference falls from {cause.before:.3g} to {cause.after:.2g} times what rounding explains"
        lines += [
            f"  {word}: {cause.hypothesis}. {cause.what}",
            f"    if torch does the same, {fall}",
            f"    change: {cause.change}",
        ]
    return lines


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
