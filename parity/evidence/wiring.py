"""The level `wiring`: bit-equal float32 where every sum is proved to be exact."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.errors import NotRecordedError, first_line
from parity.evidence.calls import Call, Evaluation
from parity.evidence.numerics import comparable, same_bits, wide
from parity.evidence.padding import NOWHERE, Padding
from parity.evidence.probes import BITS, SATURATION, probe_call, probe_weights
from parity.evidence.result import Finding, LevelResult
from parity.evidence.subject import Subject, changed
from parity.weights.leaf import gathered

# Below this share of provable values a probe says too little, and a narrower one is tried.
ENOUGH = 0.5
# Why a recorded torch model has no proof to show.
OTHER_PROBE = "the recorded torch model was proved exact with every array replaced, and ignore= leaves some out"


@dataclass(frozen=True)
class Probe:
    """Numbers on which the torch model is proved exact.

    Attributes:
        weights: by torch path, float64.
        call: the arguments.
        proof: outputs of the float64 run; NaN where nothing is proved.
        torch32: the plain float32 run.
        bits: of the widest input.
    """

    weights: dict[str, np.ndarray]
    call: Call
    proof: dict[str, np.ndarray]
    torch32: Evaluation
    bits: int


def wiring(subject: Subject) -> LevelResult:
    """Both sides on few-bit numbers and saturated scores, where float32 makes no rounding error."""
    if subject.pairing.problems:
        return LevelResult("wiring", "not run", "needs every weight paired: see the level weights")
    try:
        probe, why = find_probe(subject, {} if subject.recorded else LEARNT)
    except NotRecordedError:
        return LevelResult("wiring", "not run", OTHER_PROBE)
    except Exception as error:
        return LevelResult("wiring", "not run", f"the torch model does not run on probes: {first_line(error)}")
    if probe is None:
        return LevelResult("wiring", "not applicable", why, {"operation": why.split(":")[0]})
    weights = narrow(probe.weights)
    flax_weights = gathered(
        (p.target, p.layout.apply(p.source.of(weights[p.source.array_path])))
        for p in subject.pairing.pairs
        if p.source.array_path in weights
    )
    flax32 = subject.flax.evaluate(
        subject.flax_model, probe.call, dtype="float32", weights=flax_weights, cotangents=subject.native_cotangents
    )
    return compare_bits(probe, flax32, subject.padding)


def narrow(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    made: dict[int, np.ndarray] = {}
    return {path: made.setdefault(id(array), array.astype(np.float32)) for path, array in weights.items()}


def compare_bits(probe: Probe, flax32: Evaluation, padding: Padding = NOWHERE) -> LevelResult:
    findings, proved_count, total = [], 0, 0
    for path, expected in arrays(probe.torch32):
        where = f"output {path}" if path else "output"
        hidden = padding.hidden(path, expected.shape)
        shown = np.ones(expected.shape, bool) if hidden is None else ~hidden
        proved = proved_places(probe.proof[path], expected) & shown
        exact = same_bits(wide(expected), wide(probe.proof[path]))
        if not (exact | ~proved).all():
            return LevelResult("wiring", "not applicable", f"{where}: torch's own float32 is not exact on these numbers")
        proved_count, total = proved_count + int(proved.sum()), total + int(shown.sum())
        actual = flax32.outputs.get(path)
        if not comparable(actual, expected):
            findings.append(Finding(where, "cannot be compared: see the level structure"))
            continue
        # Also where no value is proved, NaN on one side only is a difference.
        wrong = np.where(proved, ~same_bits(wide(actual), wide(expected)), np.isnan(wide(actual)) & shown)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            text = f"{int(wrong.sum())} of {int(proved.sum())} values that must be bit-equal differ, first at {at}: "
            text += f"expected (torch) {expected[at]!s}, actual (flax) {actual[at]!s}"
            findings.append(Finding(where, text, {"differing": int(wrong.sum()), "proved": int(proved.sum())}))
    figures = {"proved": proved_count, "elements": total, "bits": probe.bits}
    summary = f"{proved_count:,} of {total:,} values proved exact, {'all bit-equal' if not findings else 'not all equal'}"
    return LevelResult("wiring", "failed" if findings else "passed", summary, figures, tuple(findings))


def arrays(run: Evaluation) -> list[tuple[str, np.ndarray]]:
    return [(path, array) for path, array in run.outputs.items() if isinstance(array, np.ndarray)]


def proved_places(proof: np.ndarray, plain: np.ndarray) -> np.ndarray:
    """Where a value is proved: NaN of the proof that is no NaN of the plain run marks what is not."""
    return ~np.isnan(wide(proof)) | np.isnan(wide(plain))


def find_probe(subject: Subject, learnt: dict[Hashable, Any]) -> tuple[Probe | None, str]:
    """The widest numbers on which the torch model is proved exact, or the operation that prevents a proof.

    Args:
        subject: of which torch's side is asked alone.
        learnt: what served before, and what this search adds.
    """
    search = Search(subject, learnt)
    # What served a model of the same class and shapes before is tried first: it does not depend on the numbers.
    best, search.few, scaled = learnt.get(search.key, (BITS[0], set(), set()))
    for bits in BITS[BITS.index(best) :]:
        probe = search.at(bits, scaled if bits == best else set())
        if probe or search.hopeless:
            return probe, search.why
    return None, search.why


# For each class and shapes: bits, inputs that feed scores, and what had to be scaled.
LEARNT: dict[Hashable, Any] = {}


class Search:
    """Tries probes, learning from each what to narrow and what to scale.

    Attributes:
        key: class and shapes of what is probed.
        few: names of inputs that feed scores; they get few bits, or the scores' sums would not fit.
        why: what prevented the last proof.
        hopeless: whether no other numbers could help.
    """

    def __init__(self, subject: Subject, learnt: dict[Hashable, Any]):
        self.subject, self.learnt = subject, learnt
        paired, found = {p.source.array_path for p in subject.pairing.pairs}, subject.torch.leaves(subject.torch_model)
        # Of a tied array one name is paired as a rule, and its other places compute with it too.
        arrays = {leaf.identity for leaf in found if leaf.path in paired}
        self.leaves = [leaf for leaf in found if leaf.identity in arrays]
        shapes = [(leaf.path, leaf.shape) for leaf in self.leaves] + [(p, a.shape) for p, a in subject.values()]
        self.key = (type(subject.torch_model), *shapes)
        self.few: set[str] = set()
        self.why = "no output has a value that could be proved"
        self.hopeless = False

    def at(self, bits: int, known: set[str]) -> Probe | None:
        """A probe of so many bits. A second try narrows what feeds scores, a third scales it."""
        scaled = set(known)
        for _ in range(5):
            weights = scale_up(probe_weights(self.leaves, self.subject.seed), scaled)
            call = self.call_of(bits, scaled)
            run, prover = self.watched(weights, call)
            if self.hopeless:
                return None
            fresh, unsaturated = prover.scores - self.few, preferred(prover.unsaturated) - scaled
            if run is not None and not unsaturated:
                with self.subject.torch.pinned():
                    plain = self.subject.torch.evaluate(
                        self.subject.torch_model, call, dtype="float32", weights=narrow(weights)
                    )
                shares = [proved_places(run.outputs[path], array).mean() for path, array in arrays(plain) if array.size]
                if shares and float(np.mean(shares)) >= ENOUGH:
                    self.learnt[self.key] = (bits, set(self.few), scaled)
                    return Probe(weights, call, run.outputs, plain, bits)
            if not fresh and not unsaturated:
                return None
            self.few |= fresh
            scaled |= unsaturated
        return None

    def call_of(self, bits: int, scaled: set[str]) -> Call:
        widths = {path: min(bits, 2) if f"input {path}" in self.few else bits for path in self.subject.call.castable}
        call = probe_call(self.subject.call, widths, self.subject.seed)
        return changed(call, lambda path, array: array * 2.0**SATURATION if f"input {path}" in scaled else array)

    def watched(self, weights: dict[str, np.ndarray], call: Call) -> tuple[Evaluation | None, Any]:
        provers: list[Any] = []

        def watch(names: dict[int, str]) -> Any:
            provers.append(self.subject.torch.Prover(names))
            return provers[0]

        model = self.subject.torch_model
        try:
            with self.subject.torch.pinned():
                run = self.subject.torch.evaluate(model, call, dtype="float64", weights=weights, watch=watch)
        except self.subject.torch.NotProvableError as stop:
            self.why, self.hopeless = str(stop), stop.structural
            return None, provers[0]
        return run, provers[0]


def preferred(names: set[str]) -> set[str]:
    """Parameters if there are any: scaling them leaves what else the inputs feed alone."""
    parameters = {name for name in names if name.startswith("parameter ")}
    return parameters or names


def scale_up(weights: dict[str, np.ndarray], names: set[str]) -> dict[str, np.ndarray]:
    """The weights with some of them saturating; tied ones stay one array."""
    made: dict[int, np.ndarray] = {}
    return {
        path: made.setdefault(id(array), array * 2.0**SATURATION) if f"parameter {path}" in names else array
        for path, array in weights.items()
    }
