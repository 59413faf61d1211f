"""Codes: unique, known, listed; no sentence of a result is without one."""

import ast
import json
from functools import lru_cache
from pathlib import Path

import pytest
from report_helpers import failing, passing, trained

import parity
from parity.errors import ParityError
from parity.evidence.hypotheses import table
from parity.said import Said, code_of

ROOT = Path(__file__).parents[3]
KNOWN = {(one.kind, one.code) for one in parity.codes()}


def test_codes_are_unique_within_their_kind_and_have_a_meaning():
    found = parity.codes()
    assert len({(one.kind, one.code) for one in found}) == len(found)
    assert {one.kind for one in found} == set(parity.KINDS)
    assert all(one.code.strip() == one.code and one.meaning for one in found)
    assert not [one for one in found if one.meaning == "No description."]
    # An error stands in place of a verdict, so that both kinds share a field.
    assert not {one.code for one in parity.codes("verdict")} & {one.code for one in parity.codes("refusal")}


def test_the_page_of_codes_is_what_the_code_says():
    told = "docs/codes.md is not what the code says: make generated"
    assert (ROOT / "docs" / "codes.md").read_text(encoding="utf-8") == parity.codes_page(), told


def test_a_kind_that_there_is_none_of_is_refused():
    with pytest.raises(parity.InputError, match="no such kind of code: 'lint'; the kinds are verdict, level, note"):
        parity.codes("lint")


@lru_cache(maxsize=1)
def calls() -> list[tuple[str, list[ast.expr]]]:
    """Every call in the package that may carry a code: what is called, and its arguments."""
    found = []
    for path in (ROOT / "parity").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if any(f"{name}(" in source for name in ("InputError", "Warned", "Said")):
            nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
            found += [(ast.unparse(node.func).rpartition(".")[2], node.args) for node in nodes]
    return found


def literals(function: str, position: int) -> set[str]:
    """The words that stand at one position of the calls of a function, in all files of the package."""
    given = [args[position] for name, args in calls() if name == function and len(args) > position]
    words = [n.value for one in given for n in ast.walk(one) if isinstance(n, ast.Constant)]
    return {word for word in words if isinstance(word, str)} - {""}


def test_every_code_in_the_source_is_in_a_table_and_every_code_of_a_table_is_used():
    refusals = literals("InputError", 1)
    assert refusals <= {*parity.REFUSALS, *parity.VERDICTS}
    by_class = {error.code for error in (ParityError, *ParityError.__subclasses__(), parity.TransferError)}
    cases = {"not-refused", "pair-raises"}
    assert set(parity.REFUSALS) <= refusals | by_class | cases
    assert literals("Warned", 0) == set(parity.KNOWN_BAD)
    said = literals("Said", 0)
    assert said <= {*parity.HINTS, *parity.NEXT}
    assert set(parity.NEXT) <= said
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "parity" / "report").glob("*.py")) + str(said)
    assert not [code for code in parity.HINTS if f'"{code}"' not in source and f"'{code}'" not in source]


@pytest.mark.parametrize("make", [passing, failing, trained, lambda: trained(False)])
def test_every_hint_of_a_result_has_a_known_code_and_every_sentence_of_the_text_is_a_hint(make):
    report = make()
    hints = json.loads(json.dumps(report.to_dict()))["hints"]
    assert {(hint["kind"], hint["code"]) for hint in hints} <= KNOWN
    told = [hint["text"] for hint in hints] + [hint["do"] for hint in hints]
    for line in str(report).splitlines():
        said = line.strip()
        for start in ("note: ", "next: ", "change: "):
            if said.startswith(start):
                assert said.removeprefix(start) in told
        if said.startswith("cause: "):
            assert any(hint["text"].partition(". if torch")[0] in said for hint in hints if hint["kind"] == "cause")
    if not report.passed:
        assert hints[-1]["kind"] == "next"


def test_a_transfers_sentences_have_codes():
    import torch
    from flax import nnx

    ours = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 5))
    theirs = nnx.Sequential(nnx.LayerNorm(4, rngs=nnx.Rngs(0)), nnx.Linear(4, 5, rngs=nnx.Rngs(0)))
    done = parity.transfer(ours, theirs)
    hints = {hint["code"]: hint["text"] for hint in done.to_dict()["hints"]}
    assert hints["setting-differs"].startswith("setting: 0: ")
    assert all(text in str(done) for text in hints.values())
    plan = parity.transfer(ours, {"other": {"kernel": theirs.layers[1].kernel[...]}}, dry=True)
    codes = {hint["code"] for hint in plan.to_dict()["hints"]}
    assert {"refused", "not-in-both"} <= codes and {("hint", code) for code in codes} <= KNOWN


def test_a_hypothesis_that_was_added_is_a_code():
    known = list(table.HYPOTHESES)
    try:
        parity.add_hypothesis("mirrored", lambda suspect: ())
        assert "mirrored" in {one.code for one in parity.codes("cause")}
    finally:
        table.HYPOTHESES[:] = known


def test_errors_carry_their_code():
    with pytest.raises(parity.InputError) as caught:
        parity.check_file("nowhere.py")
    assert caught.value.code == "file-missing"
    with pytest.raises(parity.InputError) as caught:
        parity.compare(3, 4)
    assert caught.value.code == "misuse"
    with pytest.raises(parity.TransferError) as caught:
        parity.transfer({"a": __import__("torch").ones(3)}, {"b": __import__("torch").ones(3)})
    assert caught.value.code == "does-not-fit"


def test_a_said_sentence_is_its_text_to_people_and_keeps_its_code_on_its_way_to_another_process():
    import pickle

    said = Said("left-out", "left out: a")
    assert said == "left out: a" and f"{said}" == "left out: a" and json.dumps(said) == '"left out: a"'
    again = pickle.loads(pickle.dumps(said))
    assert code_of(again, "") == "left-out" and code_of("left out: a", "other") == "other"
