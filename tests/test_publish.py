"""The page of the fault catalogue: what it says of what was measured, and that it is what the command writes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import publish

VERSIONS = {"torch": "2.13", "jax": "0.10"}
USUAL = {"torch.testing": True, "1e-3": False, "means": False}


def row(kind="epsilon", **told):
    found = {"found": True, "exact": True, "cause": True, "operation": "add, add", "modules": ["norm"], "causes": ["epsilon"]}
    known = {"model": "bert", "place": "norm", "kind": kind, "seed": 0, "seconds": 2.0, "settings": [], "code": "abc"}
    return {**known, **found, **USUAL, **told}


CLEAN_ROW = {"model": "bert", "place": None, "kind": None, "seed": 0, "seconds": 1.0, "found": False, "code": "abc"}


def trials(passed=100, alarms=(), **others):
    return {
        "command": "python -m benchmarks.clean_trials",
        "seed": 0,
        "code": "def",
        "versions": VERSIONS,
        "outcomes": {"passed": passed, **({"alarm": len(alarms)} if alarms else {}), **others},
        "pairs": {"lstm": {"identical": {"passed": passed}, "wiring": {"not applicable": 1}}},
        "ratios": {"identical": {"largest": 0.25, "trial": 7}, "trace": {"largest": 0.0, "trial": None}},
        "alarms": list(alarms),
    }


def written(*rows, clean=None):
    return publish.page({"versions": VERSIONS, "rows": [CLEAN_ROW, *rows]}, clean or trials())


def test_the_page_is_what_the_command_writes(tmp_path):
    publish.main(out=tmp_path / "catalogue.md")
    text = (tmp_path / "catalogue.md").read_text(encoding="utf-8")
    assert publish.PAGE.read_text(encoding="utf-8") == text, f"docs/catalogue.md is not of these results: {publish.COMMAND}"


def test_what_is_found_stands_beside_the_usual_practice():
    text = written(row(), row("fast variance", **{"torch.testing": False}))
    assert "| found | 2 (100.0&nbsp;%) | 1 (50.0&nbsp;%) | 0 (0.0&nbsp;%) | 0 (0.0&nbsp;%) | all |" in text
    assert "| the right cause ranked first | 2 (100.0&nbsp;%) | - | - | - | 90 % |" in text
    assert "1 of them are found by `parity.compare` and by none of the three usual ways" in text
    assert "Nothing: every fault is found" in text


def test_an_operation_is_asked_for_only_where_one_differs():
    text = written(row(), row("momentum", operation=None, silent=True))
    assert "| an operation named on both sides, of 1 that change what is computed | 1 (100.0&nbsp;%) | - |" in text


def test_every_miss_is_told_with_what_was_said_instead():
    text = written(row(), row("mask shifted", cause=False, exact=False, modules=["norm", "scores"], causes=["terms"]))
    assert "1 of 2, all of them:" in text
    missed = "not the module named, and no other, nor the right cause ranked first"
    assert f"| bert | `norm` | mask shifted | {missed} | `norm`, `scores` | terms |" in text
    silent = written(row(found=False, exact=False, cause=False, modules=[], causes=[]))
    assert "| not found, nor the module named, and no other, nor the right cause ranked first | none | none |" in silent


def test_alarms_are_counted_and_shown_and_what_was_no_comparison_is_not():
    clean = trials(98, [{"trial": 5, "pair": "lstm", "dtype": "float32", "outcome": "alarm"}], refused=3)
    text = written(row(), clean=clean)
    assert "**1 in 99** comparisons" in text and "3 refused: not counted" in text
    assert "| 5 | lstm | float32 | alarm |" in text


@pytest.mark.parametrize(
    ("alarms", "trials", "expected"),
    # Clopper and Pearson's table; without an alarm the bound is 1 - 0.05^(1/n).
    [(0, 10_000, 1 - 0.05**1e-4), (0, 59, 0.0495), (1, 100, 0.0466), (2, 20, 0.2826), (3, 3, 1.0), (0, 0, 1.0)],
)
def test_the_bound_of_the_rate_of_alarms(alarms, trials, expected):
    assert publish.upper_bound(alarms, trials) == pytest.approx(expected, rel=2e-3)
