"""What a reader must know although it decides nothing: each note has a code that stays the same."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Codes of what inputs and parameters cannot show.
LINTS = {
    "empty": "an argument holds no values",
    "zeros": "every value of an argument is zero",
    "constant": "every value of an argument is the same",
    "one-magnitude": "every value of an argument has the same magnitude",
    "whole-numbers": "every value of a floating point argument is a whole number",
    "normalised": "every row of an argument has mean 0 and variance 1",
    "not-finite": "an argument or a parameter holds NaN or infinities",
    "denormal": "an argument or a parameter holds denormal numbers",
    "batch-of-one": "an argument has a batch of one",
    "single-token": "an argument has a single position",
    "equal-entries": "all entries of a batch are the same",
    "equal-positions": "all positions hold the same",
    "equal-sizes": "batch and length are the same number",
    "same-arrays": "two arguments hold the same values",
    "wide-integers": "a 64-bit integer argument comes near what 32 bits hold",
    "float-mask": "a floating point mask of 0 and 1",
    "constant-mask": "a mask that hides nothing or everything",
    "zero-biases": "biases are zero",
    "plain-norms": "norms have scale 1 and bias 0",
    "initial-statistics": "running statistics are those of a new layer",
    "constant-kernels": "every value of a kernel is the same",
}
# Codes of what the models do, and of what was compared.
REMARKS = {
    "not-looked-into": "a trace or a diagnosis could not be made, and why",
    "input-written": "a model writes into its arguments",
    "attribute-changed": "a model changes plain attributes of its modules",
    "padding-mask": "outputs are compared outside a padding mask",
    "padding-differs": "outputs differ inside the padding mask",
    "flushed": "denormal numbers that one side turns to zero",
    "unseen-parameters": "parameters on which no output depends",
    "bound-unreached": "an activation's bound beyond which no value lies",
    "zero-gradients": "parameters whose gradient is zero on these inputs alone",
    "recorded": "a side is read from a bundle",
}
NOTE_CODES = LINTS | REMARKS


@dataclass(frozen=True)
class Note:
    """One thing that a reader must know, and that turns no verdict.

    Attributes:
        code: one of `NOTE_CODES`.
        where: path of an argument, an output or a module; '' for the whole.
        what: the rest of the sentence.
        figures: the numbers behind it.
    """

    code: str
    where: str
    what: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lint(self) -> bool:
        """Whether it tells what inputs or parameters cannot show."""
        return self.code in LINTS

    def __str__(self) -> str:
        return f"{self.where} {self.what}" if self.where else self.what
