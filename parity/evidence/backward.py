"""Which modules are wrong backwards: each pair's vector-Jacobian product alone, on what came back to torch's.

Every module that agrees forwards is run by itself on torch's inputs, with the gradients of its outputs that
torch's run had. What differs then is its own; of modules inside each other the innermost is told.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from parity.errors import NotRecordedError, first_line
from parity.evidence.calls import Call, ModuleCall
from parity.evidence.faults import Difference, Isolated, Isolation
from parity.evidence.isolation import Isolator
from parity.evidence.ladder import in_torch, magnitudes
from parity.evidence.numerics import identity, semantics_bound, wide
from parity.evidence.subject import Subject, arrays_of, as_call
from parity.evidence.trees import flatten, mapped
from parity.evidence.trial import NotComparableError, is_array, turned_back
from parity.weights.pairs import Pair

Arrays = Mapping[str, np.ndarray]


def isolate_backward(subject: Subject) -> Isolation:
    """Run every pair alone forwards and backwards.

    Raises:
        InputError: the torch model refuses its inputs.
        NotRecordedError: one of the sides is read from a bundle.
    """
    if subject.recorded:
        raise NotRecordedError("modules cannot be run alone backwards: that needs both frameworks in one place")
    isolator = Isolator(subject)
    forward = isolator.run()
    with subject.torch.pinned():
        given = subject.torch.observe_backward(subject.torch_model, subject.call, subject.cotangents or {}, dtype="float64")
    found: dict[tuple[str, int], Isolated] = {}
    for one in forward.modules:
        key = one.path, one.call
        if one.status == "agrees" and key in given.outputs:
            found[key] = Pulled(isolator, isolator.calls[key], given.outputs[key]).judged()
    inner = {key: [child for name, calls in isolator.below(isolator.calls[key]) for child in calls] for key in found}
    modules = []
    # The inner ones finish first.
    for key, one in list(found.items()):
        wrong = [child.path for child in inner[key] if (r := found.get(child.key)) and r.status in ("differs", "follows")]
        note = f"{', '.join(dict.fromkeys(wrong))} inside it is wrong backwards"
        found[key] = replace(one, status="follows", note=note) if one.status == "differs" and wrong else one
        modules.append(found[key])
    return Isolation(tuple(modules), forward.unpaired)


class Pulled:
    """One call of one pair, run alone forwards and backwards on both sides.

    Args:
        isolator: that has run.
        one: torch's call in float64.
        outputs: the gradients of its outputs, by path.
    """

    def __init__(self, isolator: Isolator, one: ModuleCall, outputs: Arrays):
        self.isolator, self.subject, self.one, self.outputs = isolator, isolator.subject, one, outputs

    def judged(self) -> Isolated:
        """Whether the two agree."""
        partner = self.isolator.partners[self.one.path]
        head = (*self.one.key, partner.path, partner.decided_by)
        try:
            expected, plain = self.torch(self.one), self.torch(self.isolator.plain[self.one.key])
            actual, notes = self.flax(expected)
        except NotComparableError as error:
            return Isolated(*head, "not comparable", note=str(error))
        except Exception as error:
            return Isolated(*head, "not comparable", note=f"{type(error).__name__}: {first_line(error)}")
        differences, worst = self.differing(expected, plain, actual)
        status = "differs" if differences else "agrees"
        between = bool(self.isolator.children.get(self.one.key))
        return Isolated(*head, status, worst, tuple(differences), between, notes)  # type: ignore[arg-type]

    def torch(self, one: ModuleCall) -> dict[str, np.ndarray]:
        """Torch's gradients, by `input ...` and by the path of a parameter in the model."""
        subject, module = self.subject, self.subject.torch_model.get_submodule(one.path)
        call = as_call(module, one.args, one.kwargs)
        dtype = "float64" if one is self.one else None
        with subject.torch.pinned():
            found = subject.torch.evaluate(module, call, dtype=dtype, cotangents=self.outputs).gradients
        start = f"{one.path}." if one.path else ""
        return {name if name.startswith("input ") else start + name: g for name, g in found.items()}

    def flax(self, expected: Arrays) -> tuple[dict[str, np.ndarray], str]:
        """Flax's gradients at the same places, in torch's layout, and what a reader must know."""
        isolator, one = self.isolator, self.one
        axes, rule = isolator.axes_of(one), isolator.rule(one.path)
        arguments = isolator.arguments(one, axes, rule)
        call = Call(arguments.args, arguments.kwargs)
        mine = as_call(self.subject.torch_model.get_submodule(one.path), one.args, one.kwargs)
        sources = {flax: torch for flax, torch in arguments.sources.items() if torch in mine.castable}
        call = replace(call, castable=frozenset(path for path, _ in arrays_of(call) if path in sources))
        back = isolator.reply(replace(one, output=self.cotangents()))
        found = self.subject.flax.pulled_back(self.subject.flax_model, isolator.partners[one.path].path, call, back)
        gradients: dict[str, np.ndarray] = {}
        # One array of Flax may stand for several of torch's.
        whole = set(sources.values()) == set(mine.castable)
        for flax, torch in sources.items() if whole else ():
            leaf = found.gradients.get(f"input {flax}")
            if leaf is not None:
                gradients[f"input {torch}"] = turned_back(axes, leaf, expected[f"input {torch}"])
        by_array: dict[str, list[Pair]] = {}
        for p in self.subject.pairing.pairs:
            by_array.setdefault(p.source.array_path, []).append(p)
        for path, own in expected.items():
            names = [p.target.array_path for p in by_array.get(path, [])]
            if names and all(name in found.gradients for name in names):
                gradients[path] = in_torch(path, by_array[path], names, found.gradients, own)
        return gradients, "" if whole else "gradients of its inputs were not compared: Flax takes one array for several"

    def cotangents(self) -> Any:
        """What came back, in the tree that torch's module returned."""
        known = {path: np.asarray(array) for path, array in self.outputs.items()}
        zero = lambda leaf: np.zeros_like(leaf) if is_array(leaf) and leaf.dtype.kind == "f" else None  # noqa: E731
        paths = dict(flatten(self.one.output, is_array))
        return mapped(lambda path, leaf: known.get(path, zero(paths.get(path))), self.one.output)

    def differing(self, expected: Arrays, plain: Arrays, actual: Arrays) -> tuple[list[Difference], float]:
        """What differs beyond rounding, worst first, and the largest difference over what rounding explains."""
        scales, found, worst = magnitudes(expected), [], 0.0
        for name, theirs in actual.items():
            mine, noise = wide(expected[name]), wide(plain.get(name, expected[name]))
            where = f"gradient of {name}"
            if mine.shape != theirs.shape:
                found.append(
                    Difference(where, float("inf"), reason=f"expected (torch) shape {mine.shape}, actual (flax) {theirs.shape}")
                )
                continue
            result, wrong = identity(wide(theirs), mine, semantics_bound(noise, mine, scales[name]))
            worst = max(worst, 0.0 if result.zero else result.ratio)
            if not result.zero and result.ratio > 1:
                gap = np.nan_to_num(np.abs(wide(theirs) - mine), nan=np.inf)
                at = tuple(int(i) for i in np.unravel_index(int(gap.argmax()), gap.shape))
                figures = (int(wrong.sum()), gap.size, at, float(theirs[at]), float(mine[at]), float(gap[at]))
                found.append(Difference(where, result.ratio, *figures))
        return sorted(found, key=lambda d: -d.ratio), worst
