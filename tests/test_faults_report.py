"""The tables of the catalogue of planted faults: what is counted, what is joined, what is kept."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.faults import report

USUAL = {"torch.testing": False, "1e-3": False, "means": False}


def row(model="m", kind="epsilon", place="norm", seed=0, **told):
    found = {"found": True, "exact": True, "cause": True, "operation": None, "modules": [place], "causes": ["epsilon"]}
    return {
        **{"model": model, "place": place, "kind": kind, "seed": seed, "seconds": 1.5, "settings": [], "code": "abc"},
        **(found if kind else {"found": False, "modules": [], "causes": []}),
        **(USUAL if kind else {}),
        **told,
    }


ROWS = [
    row(kind=None, place=None),
    row(silent=True),
    row(place="", kind="mask inverted", exact=False, modules=["a", "b"], causes=["mask"], operation="where", **{"1e-3": True}),
]


def test_what_is_found_is_counted_beside_the_usual_practice():
    text = report.markdown(ROWS, {"torch": "2.13"})
    assert "| of 2 | 2 (100.0 %) | 1 (50.0 %) | 1 (50.0 %) | 2 (100.0 %) | 0 (0.0 %) | 1 (50.0 %) | 0 (0.0 %) |" in text
    assert "| m | the model | mask inverted | yes | no (`a`, `b`) | where | yes | mask | 1.5 | no | yes | no |" in text
    assert "| m | `norm` | epsilon | yes | yes | - | yes | epsilon | 1.5 | no | no | no |" in text
    assert "| mask | 1 | 1 | 0 | 1 | 1 | 0 | 1 | 0 | 1.5 |" in text, "a kind is named after its cause"
    assert "Of 1 of the faults nothing that is computed shows" in text
    assert "Clean pairs: 1, false alarms: 0." in text and "torch 2.13; code abc" in text
    assert "1 clean pairs: 0 false alarms" in report.summary(ROWS)


def test_of_a_row_that_was_measured_twice_the_later_is_kept(tmp_path):
    parts = tmp_path / "a.json", tmp_path / "b.json"
    report.write(parts[0], ROWS, {})
    report.write(parts[1], [row(found=False), row(model="other")], {})
    rows = report.merged(map(report.read, parts))
    assert [(r["model"], r["kind"], r["found"]) for r in rows] == [
        ("m", None, False),
        ("m", "epsilon", False),
        ("m", "mask inverted", True),
        ("other", "epsilon", True),
    ]
    assert json.loads(parts[0].read_text())["rows"] == ROWS and parts[0].with_suffix(".md").exists()
    assert not list(tmp_path.glob("*.part"))


def test_a_file_that_is_not_there_is_told_where_it_is_joined(tmp_path):
    assert report.read(tmp_path / "none.json", missing_is_empty=True) == []
    with pytest.raises(FileNotFoundError):
        report.read(tmp_path / "none.json")
