"""Results into plain data for JSON."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

# Of what `to_dict` gives; a new number where a field goes, or means something else. New fields alone bring none.
SCHEMA = 1


def document(kind: str, result: Any, leave_out: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """A result for machines: its kind, the number of the schema, its fields, and every sentence that has a code."""
    found = as_data(result, leave_out) if is_dataclass(result) and not isinstance(result, Mapping) else {}
    head = {"kind": kind, "schema": SCHEMA}
    # Its hints are there already where a result is shown within another.
    return {**head, **found, **as_data(more), **({} if "hints" in found else {"hints": hints(result)})}


def hints(result: Any) -> list[dict[str, Any]]:
    """What a result tells, each sentence with its code."""
    from parity.report.hints import hints_of

    return as_data(hints_of(result))


def as_data(value: Any, leave_out: tuple[str, ...] = ()) -> Any:
    """Dataclasses, tuples and NumPy numbers into dicts, lists and numbers.

    NaN and infinities become strings: JSON has no such numbers. Fields that do not print themselves are left out. A
    result whose class has `for_machines` adds what that returns.
    """
    # A mapping that knows more than its entries is shown by those.
    if isinstance(value, Mapping):
        return {str(key): as_data(entry) for key, entry in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        found = {f.name: as_data(getattr(value, f.name)) for f in fields(value) if f.repr and f.name not in leave_out}
        if hasattr(value, "passed") and "passed" not in found:
            found["passed"] = bool(value.passed)
        return found | (as_data(value.for_machines()) if hasattr(value, "for_machines") else {})
    if isinstance(value, list | tuple | set | frozenset):
        return [as_data(entry) for entry in value]
    if isinstance(value, np.ndarray):
        return as_data(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
