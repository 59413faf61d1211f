"""The JSON schema of what results give for machines, made from their classes: it cannot say what they do not."""

import dataclasses
import json
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from parity.code_tables import Code, codes
from parity.evidence.faults import Diagnosis, Isolation
from parity.evidence.result import Diff, Report, Trace
from parity.evidence.rule_check import RuleCheck
from parity.report.data import SCHEMA
from parity.report.hints import Hint
from parity.suite import SuiteResult
from parity.surroundings import Environment, Missing, Warned
from parity.training.outcome import Training
from parity.training.states import OptimizerTransfer
from parity.weights.rules import Alone, LeafRule, Rule
from parity.weights.transfer import Transfer

# The schema as it is shipped; a test holds it to the classes.
FILE = Path(__file__).parent / "schema.json"
# The classes whose `to_dict` gives a document, by the document's kind; the fields that it leaves out.
DOCUMENTS: dict[str, tuple[type, tuple[str, ...]]] = {
    "report": (Report, ()),
    "trace": (Trace, ()),
    "isolation": (Isolation, ()),
    "diagnosis": (Diagnosis, ()),
    "diff": (Diff, ()),
    "training": (Training, ()),
    "transfer": (Transfer, ("value", "rename")),
    "optimizer transfer": (OptimizerTransfer, ("value",)),
    "rule check": (RuleCheck, ()),
    "suite": (SuiteResult, ()),
}
NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]}
TEXT = {"type": "string"}
STATUS = {"type": "integer", "description": "exit status of the process: 1 where two models do not fit, 2 for misuse"}


def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of every document that `--json` and `to_dict()` give.

    `kind` tells documents apart. `schema` is the number of the schema: it changes where a field goes or means
    something else, not where one is added.
    """
    return json.loads(FILE.read_text(encoding="utf-8"))


def made() -> dict[str, Any]:
    """The schema, from the classes."""
    known: dict[str, Any] = {}
    hints = array(of_type(Hint, known))
    roots = {kind: document(kind, of_class(cls, known, without), hints) for kind, (cls, without) in DOCUMENTS.items()}
    facts = {
        "facts": by_name(TEXT),
        "missing": array(of_type(Missing, known)),
        "warnings": array(of_type(Warned, known)),
    }
    roots["environment"] = document("environment", struct(facts, Environment), hints)
    roots["codes"] = document("codes", struct({"codes": array(of_type(Code, known))}), hints)
    roots["rules"] = document("rules", struct({"rules": array(row()), "layouts": by_name(TEXT)}), hints)
    refused = {"code": TEXT, "message": TEXT, "problems": array(TEXT), "status": STATUS, "passed": {"const": False}}
    roots["refusal"] = document("refusal", struct(refused), hints)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What parity gives for machines",
        "description": f"Schema {SCHEMA}. Made from the classes of the package by `make generated`.",
        "oneOf": [{"$ref": f"#/$defs/{name(kind)}"} for kind in roots],
        "$defs": {**{name(kind): root for kind, root in roots.items()}, **known},
    }


def name(kind: str) -> str:
    return kind.replace(" ", "_")


def document(kind: str, body: dict[str, Any], hints: dict[str, Any]) -> dict[str, Any]:
    """A result as it stands alone: with its kind, the number of the schema, and its hints."""
    head = {"kind": {"const": kind}, "schema": {"const": SCHEMA}}
    properties = {**head, **body["properties"], "hints": hints}
    return {**body, "properties": properties, "required": sorted({*body["required"], *head, "hints"})}


def struct(properties: dict[str, Any], cls: type | None = None) -> dict[str, Any]:
    said = {"description": (cls.__doc__ or "").strip().splitlines()[0]} if cls else {}
    return {"type": "object", **said, "properties": properties, "required": sorted(properties)}


def row() -> dict[str, Any]:
    """A row of the ledger as `Rule.to_dict` gives it."""
    # The name of a setting of a layer, and its value.
    told = {"anyOf": [{"type": "null"}, {"type": "array", "prefixItems": [TEXT, {}], "minItems": 2, "maxItems": 2}]}
    leaf = struct({"torch": TEXT, "flax": TEXT, "layout": TEXT, "when": told, "zero_if": told}, LeafRule)
    fates = {"enum": list(get_args(get_type_hints(Alone)["fate"]))}
    alone = struct({"torch": TEXT, "fate": fates, "because": TEXT}, Alone)
    names = {"torch": TEXT, "flax": TEXT, "linen": TEXT}
    return struct({**names, "arrays": array(leaf), "alone": array(alone), "settings": array(TEXT), "note": TEXT}, Rule)


def by_name(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": items}


def array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def of_class(cls: type, known: dict[str, Any], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """A dataclass as `as_data` gives it: what prints itself, `passed`, and what it adds for machines."""
    hints, said = get_type_hints(cls, localns=names_of()), descriptions(cls)
    shown = [field for field in dataclasses.fields(cls) if field.repr and field.name not in without]
    properties = {field.name: described(of_type(hints[field.name], known), said.get(field.name, "")) for field in shown}
    if hasattr(cls, "passed"):
        properties["passed"] = described({"type": "boolean"}, (cls.passed.__doc__ or "").strip().partition("\n")[0])
    return struct({**properties, **more_of(cls, known)}, cls)


def more_of(cls: type, known: dict[str, Any]) -> dict[str, Any]:
    """What a class gives beside its fields."""
    if cls is Report:
        verdicts = [one.code for one in codes("verdict")]
        return {"verdict": {"enum": verdicts}, "headline": TEXT, "hints": array(of_type(Hint, known))}
    if cls is Transfer:
        return {"arrays": {"type": "integer"}, "bytes": {"type": "integer"}}
    return {"figures": by_name({"type": "integer"})} if cls is SuiteResult else {}


def of_type(hint: Any, known: dict[str, Any]) -> dict[str, Any]:
    """A type as JSON has it."""
    origin, inner = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if hint.__name__ not in known:
            # Its name first: a class may hold others of its kind.
            known[hint.__name__] = {}
            known[hint.__name__] = of_class(hint, known)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [of_type(one, known) for one in inner]}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return by_name(of_type(inner[1], known))
    if origin in (tuple, list, set, frozenset):
        if origin is tuple and inner[-1] is not Ellipsis:
            fixed = [of_type(one, known) for one in inner]
            return {"type": "array", "prefixItems": fixed, "minItems": len(fixed), "maxItems": len(fixed)}
        return array(of_type(inner[0], known))
    plain: dict[Any, dict[str, Any]] = {
        str: TEXT,
        int: {"type": "integer"},
        bool: {"type": "boolean"},
        float: NUMBER,
        type(None): {"type": "null"},
    }
    if hint is Any or hint in plain:
        return plain.get(hint, {})
    raise TypeError(f"no JSON is known for {hint!r}; say in of_type what as_data makes of it")


def names_of() -> dict[str, Any]:
    """Classes that annotations name without importing them."""
    return {cls.__name__: cls for cls, _ in DOCUMENTS.values()}


def descriptions(cls: type) -> dict[str, str]:
    """What the docstring of a class says of each attribute."""
    return dict(entries((cls.__doc__ or "").partition("Attributes:\n")[2]))


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Names and sentences of a docstring's section."""
    for found in re.finditer(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", text, re.MULTILINE):
        yield found[1], re.sub(r"\s+", " ", found[2])


def described(body: dict[str, Any], text: str) -> dict[str, Any]:
    return {**body, "description": text} if text else body


def as_shipped() -> str:
    """The schema as the file holds it."""
    return json.dumps(made(), indent=1) + "\n"
