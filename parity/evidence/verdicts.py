"""What a comparison comes to, in one word for machines."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parity.evidence.result import Report

# The verdicts of a report, and those that an `InputError` brings in place of one, in its `code`.
VERDICTS = {
    "same": "every level that was asked for passed, `identical` among them",
    "agrees as asked": "every level that was asked for passed, `identical` was not among them",
    "not proved": "a level could not run, and none failed",
    "cannot be paired": "no parameter of one model has a counterpart in the other",
    "one side raises": "one model refuses inputs that the other takes",
    "outputs differ in structure": "the models return other trees",
    "a setting differs": "the numbers are the same on these inputs, a setting is not",
    "trained otherwise": "the functions are the same, and part in training",
    "differs": "a level failed otherwise",
    "both sides raise": "both models refuse the inputs (the code of an InputError)",
    "nothing returned": "neither model returns anything (the code of an InputError)",
    "not repeatable": "a model returns other numbers, or raises, when it is run again (the code of an InputError)",
    "ids out of range": "an argument names rows that a table has not (the code of an InputError)",
}


def verdict_of(report: "Report") -> str:
    """The one of `VERDICTS` that a report comes to."""
    passed = {level.level for level in report.levels if level.passed}
    failed = {level.level: level for level in report.levels if level.status == "failed"}
    if report.passed:
        return "same" if "identical" in passed else "agrees as asked"
    if not failed:
        return "not proved"
    for level, figure, verdict in (
        # Models of other parts seldom take the same inputs either.
        ("weights", "cannot be paired", "cannot be paired"),
        ("structure", "raises", "one side raises"),
        ("structure", "trees differ", "outputs differ in structure"),
    ):
        if level in failed and failed[level].figures.get(figure):
            return verdict
    if [*failed] == ["training"] and "identical" in passed:
        return "trained otherwise"
    only_settings = [*failed] == ["weights"] and all(f.figures.get("setting") for f in failed["weights"].findings)
    return "a setting differs" if only_settings and "identical" in passed else "differs"
