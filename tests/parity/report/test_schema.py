"""The JSON schema: it is shipped, it is what the classes give, and all that is given fits it."""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from evidence_pairs import two
from flax import nnx
from report_helpers import failing, passing, trained

import parity
from parity.report import schema as schemas
from parity.suite import CaseResult, SuiteResult

SCHEMA = parity.schema()


def strict(part: Any) -> Any:
    """The same, refusing fields that it does not name: the shipped one lets newer versions add some."""
    if isinstance(part, list):
        return [strict(one) for one in part]
    if not isinstance(part, dict):
        return part
    found = {key: strict(value) for key, value in part.items()}
    return {**found, "additionalProperties": False} if isinstance(part.get("properties"), dict) else found


VALIDATOR = jsonschema.Draft202012Validator(strict(SCHEMA))


def fits(kind: str, document: Any) -> None:
    # As a script gets it.
    document = json.loads(json.dumps(document, allow_nan=False))
    assert (document["kind"], document["schema"]) == (kind, 1)
    own = VALIDATOR.evolve(schema={**strict(SCHEMA), "oneOf": [{"$ref": f"#/$defs/{schemas.name(kind)}"}]})
    errors = [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in own.iter_errors(document)]
    assert not errors
    VALIDATOR.validate(document)


def test_the_schema_is_valid_and_is_what_the_classes_give():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert schemas.FILE.read_text(encoding="utf-8") == schemas.as_shipped(), (
        "schema.json is not what the classes give: make generated"
    )


@pytest.mark.parametrize("make", [passing, failing, trained, lambda: trained(False)])
def test_reports_fit(make):
    report = make()
    fits("report", report.to_dict())
    if report.trace:
        fits("trace", report.trace.to_dict())
    if report.diagnosis:
        fits("diagnosis", report.diagnosis.to_dict())
        fits("isolation", report.diagnosis.isolation.to_dict())
    if report.training:
        fits("training", report.training.to_dict())


def test_a_suite_fits_whatever_came_of_its_cases():
    cases = (
        CaseResult("a", "A", "cpu", passing(), 0.1),
        CaseResult("b", "B", "cpu", failing()),
        CaseResult("c", "C", "cpu", skipped="no GPU"),
        CaseResult("d", "D", "cpu", refused=True),
        CaseResult("e", "E", "cpu", error="it raises", code="pair-raises"),
    )
    document = SuiteResult(cases, environment=parity.environment()).to_dict()
    fits("suite", document)
    # A report within a suite says as much as one alone.
    assert document["cases"][1]["report"]["verdict"] == "differs"
    assert document["cases"][1]["report"]["hints"] == failing().to_dict()["hints"]


def test_transfers_fit_as_they_are_done_planned_and_refused():
    fits("transfer", parity.transfer(*two()).to_dict())
    fits("transfer", parity.transfer({"a": torch.ones(3)}, {"b": torch.ones(4)}, dry=True).to_dict())
    ours, theirs = torch.nn.Linear(3, 2), nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    ours(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    twin = nnx.Optimizer(theirs, parity.to_optax(optimizer, ours, theirs), wrt=nnx.Param)
    fits("optimizer transfer", parity.transfer_optimizer(optimizer, twin, ours, theirs).to_dict())
    fits("rule check", parity.check_rule(torch.nn.Linear(3, 2), nnx.Linear(3, 2, rngs=nnx.Rngs(0))).to_dict())


@pytest.mark.parametrize("actual", [np.zeros(3), np.array([1.0, np.nan, np.inf]), np.ones((2, 2)), np.ones(3)])
def test_a_diff_fits_also_where_numbers_are_none(actual):
    fits("diff", parity.diff(actual, np.ones(3)).to_dict())


def test_what_the_command_line_tells_besides_fits():
    fits("environment", parity.environment().to_dict())
    fits("codes", parity.codes_document(parity.codes()))
    ledger = parity.rules_document()
    fits("rules", ledger)
    assert len(ledger["rules"]) == len(parity.rules()) and ledger["layouts"] == parity.layout_names()
    error = parity.TransferError("two problems", ["one", "two"])
    fits("refusal", parity.refusal(error, 1))


def test_what_does_not_fit_is_refused():
    document = passing().to_dict()
    for spoiled in (
        {**document, "schema": 2},
        {**document, "verdict": "perfect"},
        {key: value for key, value in document.items() if key != "hints"},
        {**document, "levels": [{"level": "weights"}]},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(json.dumps(spoiled)), SCHEMA)
    # A later version may say more.
    jsonschema.validate(json.loads(json.dumps({**document, "further": 1})), SCHEMA)


def test_a_type_of_which_no_json_is_known_is_told():
    with pytest.raises(TypeError, match="no JSON is known for <class 'complex'>; say in of_type"):
        schemas.of_type(complex, {})
