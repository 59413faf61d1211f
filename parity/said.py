"""Sentences with codes: what a person reads as a sentence, a script knows by a code that stays the same."""

# Codes of sentences that stand in results beside the notes of `parity.NOTE_CODES`.
HINTS = {
    # levels
    "level-failed": "a level of the ladder failed",
    "level-not-run": "a level could not run, and does not count as passed",
    "level-not-applicable": "a level says nothing about this model, and is no obstacle",
    "finding": "one thing that fails in a level",
    "level-note": "what a reader must know of a level",
    "left-out": "a leaf is left out, because ignore= says so",
    "setting-left-out": "a setting that differs does not count, because ignore= says so",
    "setting-made-good": "a setting that differs, and that code around the layer makes good",
    "dtype-not-refused": "one side takes another dtype, the other refuses it; counts with strict=True alone",
    "integers-on-ties": "whole numbers that hang on a tie, and agree where there is none",
    "gradients-off-ties": "gradients are compared on inputs that are moved off ties",
    "overflows": "values of torch itself overflow in its dtype, and were compared in float64 only",
    "gradients-in-float64": "gradients were compared in float64 only",
    "zero-gradient": "gradients that are zero in exact arithmetic, so that both sides show rounding alone",
    "more-findings": "findings that are not listed",
    # modules
    "fault-in-module": "a module is given the same on both sides and returns something else",
    "fault-before-module": "what a module is given differs already: the fault lies in the code before it",
    "not-paired": "a module of one side has no counterpart that was called",
    "not-compared": "a pair of modules could not be compared",
    "follows": "a module differs, and may do so because of a wrong module inside it",
    "module-note": "what a reader must know of one pair of modules",
    "modules-agree": "a level fails, and every module that could be paired agrees in float64",
    "no-operation": "no operation of a wrong module can be named, and why",
    "wrong-module": "a module is wrong for itself",
    "wrong-backwards": "the gradients of a module are wrong for themselves",
    # diagnosis
    "no-known-cause": "no hypothesis explains what is wrong with a module",
    "cause-not-tried": "a hypothesis could not be tried on a module",
    "time-ran-out": "the time for causes ran out before all were tried",
    "setting-differs": "a setting of a layer, such as an epsilon, is not the same on both sides",
    # training
    "trained-apart": "the runs part in training",
    "rounding-gradient": "a gradient is rounding alone, and is not compared",
    "without-gradient": "a parameter gets no gradient and is left alone on both sides",
    "masks-not-replayed": "torch's dropout masks have no place in the Flax model",
    "training-note": "what a reader must know of a training",
    # transfers
    "tie-lost": "arrays that are one array on one side only",
    "tied": "names that are one array",
    "random-state": "random state and what runs leave behind stay as they are",
    "without-counterpart": "an array that has no counterpart by its nature",
    "transfer-note": "what was found in a checkpoint, or what was made of names",
    "read-back": "the result was read back and is bit-equal",
    "by-name": "layouts that were decided by the name alone",
    "not-in-both": "a leaf without counterpart, with the nearest names",
    "refused": "why a transfer is refused",
    # cases
    "skipped": "a case that did not run, and why",
    "refused-alike": "both sides refuse the inputs of a case, as they must",
}
# The one thing to do next.
NEXT = {
    "mend-what-raises": "one side raises: mend it, or give inputs that both take",
    "decide-inside-jit": "Flax decides by values in Python, which jax.jit does not let it: use jnp.where or jax.lax.cond",
    "bind-the-argument": "Flax asks for an argument that torch does not have: bind it",
    "name-the-counterparts": "pair parameters by rename={...}",
    "return-the-same-tree": "return the same structure on both sides",
    "set-it-alike": "set what differs alike on both sides",
    "look-at-training": "the models agree: look at the level training",
    "name-the-other-levels": "a level could not run: judge by the others alone",
    "diagnose": "ask parity.diagnose which modules are wrong",
    "compare-both": "one side was recorded: parity.compare tells more where both frameworks are installed",
    "trace": "ask parity.trace for every module in torch's order",
    "make-the-change": "make the change that the cause names, then compare again",
    "look-at-gradients": "modules agree forwards: look for what stops or changes a gradient in them",
    "look-at-the-code": "no cause is known: look at the code of the wrong modules",
}
# Codes of errors, in their `code`, beside those that `parity.VERDICTS` holds.
REFUSALS = {
    "misuse": "an argument or an option is not what it must be",
    "does-not-fit": "source and target of a transfer do not fit; nothing was written",
    "missing-package": "a framework or another package is not installed",
    "diverges": "two models or two sets of arrays are not the same",
    "no-model": "what was given as a model is none that is known",
    "no-such-level": "there is no level of that name",
    "no-such-case": "no case or module is called like that, or several are",
    "no-device": "the device is not there",
    "file-missing": "there is no such file or folder",
    "file-unreadable": "a file cannot be read, or is not what its name says",
    "no-bundle": "a safetensors file holds no recording",
    "bundle-newer": "a bundle is of a later version than is read here",
    "bundle-older": "a bundle is of a version that is no longer read",
    "file-unwritable": "a file cannot be written: no space, no right, no folder, or a folder stands there",
    "file-exists": "a file stands there already and was left as it is",
    "cases-file-raises": "a file of cases raises where it is imported",
    "cases-file-empty": "a file of cases declares no pair",
    "cases-file-loses": "a file of cases declares a pair that it has under no name, so that it would never be compared",
    "pair-raises": "the function that makes a pair raises, or returns no pair",
    "not-refused": "both sides must refuse the inputs of a case, and one did not",
    "no-rngs": "what builds a Flax model does not take rngs",
}


class Said(str):
    """A sentence that has a code of its own; to people it is the sentence alone."""

    code: str

    def __new__(cls, code: str, sentence: str) -> "Said":
        said = super().__new__(cls, sentence)
        said.code = code
        return said

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.code, str(self)


def code_of(sentence: str, otherwise: str) -> str:
    """The code of a sentence, or the given one if it has none of its own."""
    return sentence.code if isinstance(sentence, Said) else otherwise
