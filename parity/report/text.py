"""Results in words, for a terminal."""

from typing import TYPE_CHECKING

from parity.evidence.result import PROVES

if TYPE_CHECKING:
    from parity.evidence.result import ArrayDiff, Diff, Divergence, LevelResult, Report, Trace
    from parity.weights.transfer import Transfer

SIGNS = {"passed": "ok", "failed": "FAILED", "not applicable": "n/a", "not run": "NOT RUN"}
# Findings shown for each level; the rest is in to_dict().
SHOWN = 3
WIDTH = 60


def transfer_text(transfer: "Transfer") -> str:
    """The plan as a table, then what a reader must know."""
    size = sum(entry.bytes for entry in transfer.plan)
    shared = sum(entry.shared for entry in transfer.plan)
    lines = [
        f"{len(transfer.plan)} arrays, {size:,} bytes" + (f", {shared} of them sharing memory" if shared else ", all copied")
    ]
    width = max((len(entry.source) for entry in transfer.plan), default=0)
    for entry in transfer.plan:
        dtype = entry.dtype if entry.dtype == entry.target_dtype else f"{entry.dtype} -> {entry.target_dtype}"
        lines.append(f"  {entry.source:<{width}} -> {entry.target}  {entry.layout}, {entry.shape} {dtype}")
    lines += [f"  left out: {path}" for path in transfer.ignored]
    if transfer.random:
        lines.append(f"  random state stays: {len(transfer.random)} arrays")
    lines += [f"  one array: {', '.join(names)}" for names in transfer.ties]
    lines += [f"  tie lost: {sentence}" for sentence in transfer.lost_ties]
    lines += [f"  setting: {sentence}" for sentence in transfer.settings]
    by_name = sum(entry.decided_by == "name" for entry in transfer.plan)
    if by_name:
        lines.append(f"  {by_name} layouts were decided by name, no layer type being known")
    return "\n".join(lines)


def report_text(report: "Report") -> str:
    """One line if all is well; else the ladder, then where and how much."""
    passed = [level for level in report.levels if level.passed]
    extra = [f"  {level.level}: not applicable, {level.summary}" for level in report.levels if level.status == "not applicable"]
    notes = [f"  note: {note}" for note in report.notes]
    if report.passed:
        elements = sum(level.figures.get("elements", 0) for level in passed if level.level == "identical")
        names = ", ".join(level.level for level in passed)
        head = f"the same function: {names}" + (f" ({elements:,} values identical)" if elements else "")
        return "\n".join([head, *extra, *notes])
    failed = any(level.status == "failed" for level in report.levels)
    lines = ["NOT the same function" if failed else "not proved: a level could not run"]
    for level in report.levels:
        lines += level_lines(level)
    divergence = report.trace.first_divergence() if report.trace else None
    if divergence:
        lines += ["", *divergence_lines(divergence)]
    elif report.trace and failed:
        lines += ["", "every module's output agrees in float64: look at the levels that failed"]
    return "\n".join([*lines, *notes, f"  seed {report.seed}"])


def level_lines(level: "LevelResult") -> list[str]:
    lines = [f"  {level.level:<10} {SIGNS[level.status]:<8} {level.summary}"]
    for finding in level.findings[:SHOWN]:
        lines.append(f"      {finding.where + ': ' if finding.where else ''}{finding.what}")
    if len(level.findings) > SHOWN:
        lines.append(f"      and {len(level.findings) - SHOWN} more")
    lines += [f"      note: {note}" for note in level.notes]
    if level.status == "not run":
        lines.append("      does not count as passed; leave the level out to judge by the others")
    return lines


def divergence_lines(found: "Divergence") -> list[str]:
    """Where, how much, and by what tolerance it would have passed."""
    path = (found.path or "the model") + (f", call {found.call + 1}" if found.call else "")
    last = f"last agreement: {found.last_agreement}" if found.last_agreement is not None else "no module before it"
    if found.last_agreement == "":
        last = "last agreement: the model"
    lines = [f"{path}   first divergence   ({last})"]
    if found.reason:
        return [*lines, f"  {found.output + ': ' if found.output else ''}{found.reason}"]
    output = f"output {found.output}: " if found.output else ""
    lines.append(
        f"  {output}{found.differing} of {found.elements} values differ; {found.ratio:.3g} times what rounding explains"
    )
    lines.append(
        f"  worst at {found.worst}: expected (torch) {found.torch:.6g}, actual (flax) {found.flax:.6g}, "
        f"difference {found.difference:.3g}"
    )
    lines.append(f"  would pass at atol={found.atol:.3g}")
    return lines


def trace_text(trace: "Trace") -> str:
    """The first divergence, or that there is none."""
    found = trace.first_divergence()
    agreeing = sum(step.agrees for step in trace.steps)
    lines = divergence_lines(found) if found else [f"no divergence: {agreeing} module calls agree"]
    if trace.unpaired:
        shown = ", ".join(trace.unpaired[:SHOWN]) + (
            f" and {len(trace.unpaired) - SHOWN} more" if len(trace.unpaired) > SHOWN else ""
        )
        lines.append(f"  not paired: {shown}")
    return "\n".join(lines)


def diff_text(diff: "Diff") -> str:
    """The leaves that differ, worst first; one line if none does."""
    wrong = sorted((leaf for leaf in diff.leaves if not leaf.agrees), key=lambda leaf: -leaf.difference)
    elements = sum(leaf.elements for leaf in diff.leaves)
    if not wrong:
        return f"no difference: {len(diff.leaves)} arrays, {elements:,} values"
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
    ulp = f", at most {leaf.ulp} ulp near the scale" if leaf.ulp is not None else ""
    lines = [
        f"  {name}: {leaf.reason}, {leaf.differing} of {leaf.elements}",
        f"    worst at {leaf.worst}: actual {leaf.actual!r}, expected {leaf.expected!r}, "
        f"largest difference {leaf.difference:.3g}{ulp}",
    ]
    if leaf.atol is not None:
        lines.append(f"    would pass at atol={leaf.atol:.3g}")
    return lines


def proves(level: str) -> str:
    """What a level shows, in one sentence."""
    return PROVES[level]
