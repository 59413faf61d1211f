"""The masks of a run on the record."""

from typing import Any

from parity.dropout.masks import Drop, DropoutMasks


def as_facts(masks: DropoutMasks | None) -> dict[str, Any] | None:
    """Masks as values that a bundle keeps."""
    if masks is None:
        return None
    return {"modules": masks.modules, "convolutional": masks.convolutional, "drops": [vars(drop) for drop in masks.drops]}


def from_facts(facts: dict[str, Any] | None) -> DropoutMasks | None:
    """Masks as they were recorded."""
    if facts is None:
        return None
    return DropoutMasks("torch", facts["modules"], facts["convolutional"], [Drop(**told) for told in facts["drops"]])
