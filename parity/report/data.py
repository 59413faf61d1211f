"""Results into plain data for JSON."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def as_data(value: Any, leave_out: tuple[str, ...] = ()) -> Any:
    """Dataclasses, tuples and NumPy numbers into dicts, lists and numbers.

    NaN and infinities become strings: JSON has no such numbers. Fields that do not print themselves are left out.
    """
    if is_dataclass(value) and not isinstance(value, type):
        found = {f.name: as_data(getattr(value, f.name)) for f in fields(value) if f.repr and f.name not in leave_out}
        if hasattr(value, "passed") and "passed" not in found:
            found["passed"] = bool(value.passed)
        return found
    if isinstance(value, Mapping):
        return {str(key): as_data(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_data(entry) for entry in value]
    if isinstance(value, np.ndarray):
        return as_data(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
