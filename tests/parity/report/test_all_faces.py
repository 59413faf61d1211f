"""The same verdict, words and figures on all faces: text, page, notebook, JSON, pytest, from one result."""

import json
import re

import pytest
from report_helpers import Words, failing, passing, squeezed, trained

import parity
from parity import declared
from parity.report import text
from parity.report.html import cases_page, report_page
from parity.suite import CaseResult


def faces(report: parity.Report) -> dict[str, str]:
    """What each face says, blanks and markup taken away."""
    try:
        report.raise_for_divergence()
        raised = str(report)
    except parity.DivergenceError as error:
        raised = str(error)
    # What a worker of pytest sends home, and the page of the whole run that is made of it.
    carried = json.loads(json.dumps(declared.case_view(CaseResult("case", "case", "cpu", report))))
    said = {
        "text": str(report),
        "error": raised,
        "page": Words(report_page(report)).text,
        "page of a run": Words(cases_page([carried], "Comparisons")).text,
        "notebook": Words(report._repr_html_()).text,
        "JSON": json.dumps(report.to_dict(), ensure_ascii=False).replace('\\"', '"'),
    }
    return {name: squeezed(face) for name, face in said.items()}


REPORTS = {"passing": passing, "failing": failing, "trained": trained, "trained otherwise": lambda: trained(False)}


@pytest.mark.parametrize("name", REPORTS)
def test_the_verdict_and_the_figures_of_every_level_are_the_same_on_all_faces(name):
    report = REPORTS[name]()
    said = faces(report)
    assert report.verdict == {"failing": "differs", "trained otherwise": "trained otherwise"}.get(name, "same")
    for face, words in said.items():
        # The page of a run counts cases; the verdict of each stands in its figures.
        if face != "page of a run":
            assert text.headline(report) in words, face
        for level in report.levels:
            # What passed is told in one line where all of it did.
            if not report.passed or face in ("page", "page of a run", "notebook", "JSON"):
                assert squeezed(level.summary) in words, (face, level.level)


@pytest.mark.parametrize("name", ["failing", "trained otherwise"])
def test_causes_changes_notes_and_the_next_step_are_the_same_on_all_faces(name):
    report = REPORTS[name]()
    causes = [*(report.diagnosis.causes[:1] if report.diagnosis else ()), *(report.training.causes if report.training else ())]
    assert causes
    told = [c.hypothesis for c in causes] + [c.what for c in causes] + [c.change for c in causes]
    told += [*map(str, report.notes), str(text.next_step(report))]
    found = report.trace.first_divergence() if report.trace else None
    told += [f"{found.ratio:.3g} times what rounding explains", str(text.side_of_fault(found))] if found else []
    for face, words in faces(report).items():
        if face == "page of a run":
            # The next step of one case stands on its own page.
            continue
        for sentence in told:
            if face == "JSON" and found and sentence.startswith(f"{found.ratio:.3g} "):
                continue
            assert squeezed(sentence) in words, (face, sentence)


def test_how_much_a_cause_explains_is_told_on_all_faces():
    report = failing()
    [cause] = report.diagnosis.causes[:1]
    figures = re.escape(f"from {cause.before:.3g} to {cause.after:.2g} times what rounding explains")
    for face, words in faces(report).items():
        assert re.search(figures, words), face


def test_a_cause_that_explains_a_part_says_so():
    cause = parity.Cause("factor", "a", "it is doubled", "halve it", 9.0, 0.1, ("output [0]",), False)
    [*_, fall, _] = text.cause_lines([cause])
    assert fall.endswith("what rounding explains; it explains output [0] alone, not all that differs")
    assert text.extent(parity.Cause("factor", "a", "", "", 9.0, 0.1, ("output [0]",), True)) == ""


@pytest.mark.parametrize("name", ["trained", "trained otherwise"])
def test_every_step_of_a_training_is_on_the_page_and_in_json_and_its_rows_in_the_text(name):
    report = REPORTS[name]()
    page, data = faces(report)["page"], report.to_dict()
    assert [step["step"] for step in data["training"]["drift"]] == [1, 2, 3]
    for row in str(report.training).splitlines():
        if re.match(r"\s+\d+ ", row):
            assert squeezed(row).strip() in page
    assert squeezed(str(report.training).splitlines()[0]) in page


def test_a_report_of_several_input_sets_says_which_differ_on_all_faces():
    from dataclasses import replace

    from parity.evidence.result import SetResult

    sets = (SetResult("plain", "all", True, (), "same"), SetResult("large", "scales", False, ("identical",), "differs"))
    report = replace(failing(), sets=sets, inputs="large")
    for face, words in faces(report).items():
        assert "large" in words, face
        if face not in ("JSON",):
            assert "1 of 2 input sets fail: large; agreeing: plain" in words, face


def test_modules_that_are_wrong_backwards_are_on_all_faces():
    from dataclasses import replace

    from parity.evidence.faults import Difference, Isolated, Isolation

    wrong = Isolated("core", 0, "core", "name", "differs", 31.0, (Difference("gradient of q", 31.0),))
    report = replace(failing(), backward=Isolation((wrong,)))
    for face, words in faces(report).items():
        assert "core gradient of q: 31 times what rounding explains" in words, face


def test_what_could_not_run_says_on_all_faces_what_to_do():
    from parity.evidence.result import LevelResult, Report

    report = Report((LevelResult("wiring", "not run", "needs every weight paired"),))
    assert report.verdict == "not proved"
    for face, words in faces(report).items():
        if face != "page of a run":
            assert "name the other levels in levels=[...] to judge by them alone" in words, face


def test_that_no_module_differs_although_a_level_failed_is_on_all_faces():
    from parity.evidence.result import LevelResult, Report, Step, Trace

    report = Report(
        (LevelResult("native", "failed", "error 9 times the allowed"),), Trace((Step("a", 0, True), Step("", 0, True)))
    )
    for face, words in faces(report).items():
        assert "all 2 module calls that could be paired agree in float64: look at the levels that failed" in words, face
    assert "modules-agree" in {hint["code"] for hint in report.to_dict()["hints"]}


def test_why_no_operation_is_named_is_on_all_faces_that_tell_of_the_module():
    from parity.evidence.faults import Difference, FirstOperation, Isolated, Isolation

    wrong = Isolated(
        "core",
        0,
        "core",
        "name",
        "differs",
        3.0,
        (Difference("output", 3.0),),
        False,
        "",
        FirstOperation(None, None, "", "too long"),
    )
    isolation = Isolation((wrong,))
    assert "no operation is named: too long" in str(isolation)
    [hint] = [hint for hint in isolation.to_dict()["hints"] if hint["code"] == "no-operation"]
    assert (hint["text"], hint["where"]) == ("too long", "core")
