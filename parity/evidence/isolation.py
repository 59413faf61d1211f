"""Every pair of modules run alone on what torch's module was given, so that each is judged for itself.

A module that calls other modules gets torch's answers from them: what it computes between its
children is seen whether they are right or wrong, and so is what it gives them.
"""

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from parity.errors import InputError, first_line
from parity.evidence.calls import Alone, ModuleCall
from parity.evidence.conventions import AS_IN_TORCH, BATCH_FIRST, MASK, USUAL, Axes, Convention, convention
from parity.evidence.faults import Difference, Isolated, Isolation
from parity.evidence.hypotheses.weight import Weight, weights_of
from parity.evidence.judging import compared
from parity.evidence.partners import partners
from parity.evidence.shelf import Shelf
from parity.evidence.subject import Subject
from parity.evidence.trees import flatten, mapped
from parity.evidence.trial import (
    PLAIN,
    Arguments,
    NotComparableError,
    Place,
    Trial,
    by_argument,
    distance,
    is_array,
    like,
    refilled,
    skeleton,
    spoken,
    turned,
    turned_back,
    values,
)
from parity.weights.leaf import gathered
from parity.weights.paths import turn_of


class Isolator:
    """Runs pairs alone, the inner ones first, and keeps what later ones need to know of them.

    Args:
        subject: the two models and their call.
        dtype: in which both run; None is the dtype of the models.
    """

    def __init__(self, subject: Subject, dtype: str | None = "float64"):
        self.subject, self.dtype = subject, dtype
        shelf = Shelf()
        self.plain = observed(subject, None, shelf)
        self.calls = self.plain if dtype is None else observed(subject, dtype, shelf)
        self.own = own_calls(subject, dtype, shelf)
        self.partners, self.unpaired = partners(subject, self.calls.aside, self.own.aside)
        self.torch_layers = {layer.path: layer for layer in subject.torch.layers(subject.torch_model)}
        self.flax_layers = {layer.path: layer for layer in subject.flax.layers(subject.flax_model)}
        self.flax_layers |= {p.path: self.flax_layers[turn_of(p.path)[0]] for p in self.partners.values()}
        self.children = nearest_children({c.key: c for c in self.calls.aside}, set(self.partners))
        # In which order of axes a pair was found right, and what it is called with in the model's own run.
        self.right: dict[str, list[Axes]] = {}
        self.results: dict[tuple[str, int], Isolated] = {}
        self.trials: dict[tuple[str, int], Trial] = {}

    def run(self) -> Isolation:
        """Every pair, in the order in which torch's modules finish."""
        for key, one in self.calls.items():
            if one.path not in self.partners or key not in self.plain:
                continue
            try:
                self.results[key] = self.judge(one)
            except NotComparableError as error:
                partner = self.partners[one.path]
                self.results[key] = Isolated(*key, partner.path, partner.decided_by, "not comparable", note=str(error))
        modules = tuple(self.settled(one) for one in self.results.values())
        return Isolation(modules, self.unpaired, self.dtype or self.subject.dtype)

    def settled(self, one: Isolated) -> Isolated:
        """The same, where a module that only answers in another form is no fault: what calls it agrees.

        A projection may be cut into several, or return less than torch's; whoever calls it knows how to take that.
        """
        forms = [d.reason for d in one.differences if d.elements == 0 and d.where.startswith("output")]
        told = [reason for reason in forms if reason.startswith(("expected (torch) shape", "torch has it", "flax has it"))]
        caller = self.calls.by_key[one.path, one.call].inside if one.status == "differs" and one.path else None
        while caller is not None and caller not in self.results:
            caller = self.calls.by_key[caller].inside
        if caller is None or not told or len(told) < len(one.differences) or self.results[caller].status != "agrees":
            return one
        return replace(one, status="agrees", ratio=0.0, differences=(), note=f"answers in another form: {told[0]}")

    # --- one pair -----------------------------------------------------------------------------

    def judge(self, one: ModuleCall) -> Isolated:
        """One call: in torch's order of axes, and in the one that the model's own run shows, if that is another."""
        trials = []
        for axes in self.orders(one):
            trial = self.attempt(one, axes)
            differences, ratio = self.compared(trial)
            trials.append((trial, differences, ratio))
            if not differences and not trial.error:
                self.right.setdefault(one.path, []).append(axes)
        trial, differences, ratio = min(trials, key=lambda t: (bool(t[0].error), len(t[1]) > 0, t[2]))
        if differences or trial.error:
            self.trials[one.key] = trial
        partner = trial.partner
        head = (*one.key, partner.path, partner.decided_by)
        if trial.error:
            if not self.own:
                # Flax's model does not finish by itself either: here is where it stops, or in a module below.
                raising = (Difference("output", float("inf"), reason=f"Flax raises {trial.error}"),)
                inner = [name for name, _ in self.below(one) if self.is_comparable(name) and not self.is_right(name)]
                note = f"{', '.join(inner)} inside it is wrong" if inner else ""
                return Isolated(*head, "follows" if inner else "differs", float("inf"), raising, False, note)
            raise NotComparableError(f"called alone as torch's module is called, Flax raises {trial.error}")
        if not differences:
            return Isolated(*head, "agrees", ratio, note=trial.note)
        if self.strange(one):
            raise NotComparableError(f"the Flax model gives it {self.shapes(one)[1]}, torch {self.shapes(one)[0]}")
        followed = [child for child in trial.free if not self.is_right(child)]
        between = bool(self.children.get(one.key))
        if followed:
            note = f"its own code could not be told from {', '.join(followed)}, which could not answer as torch's did"
            return Isolated(*head, "follows", ratio, differences, between, note)
        return Isolated(*head, "differs", ratio, differences, between, trial.note)

    def compared(self, trial: Trial) -> tuple[tuple[Difference, ...], float]:
        """What differs in a call, worst first, and the largest difference over what is allowed."""
        return compared(trial, self.subject)

    def is_right(self, path: str) -> bool:
        """Whether a module and all that were looked at below it are."""
        calls = [result for (name, _), result in self.results.items() if f"{name}.".startswith(f"{path}.")]
        return any(one.path == path for one in calls) and all(one.status == "agrees" for one in calls)

    def is_comparable(self, path: str) -> bool:
        return all(one.status != "not comparable" for (name, _), one in self.results.items() if name == path)

    def orders(self, one: ModuleCall) -> list[Axes]:
        """The orders of axes in which Flax's module may want what torch's was given."""
        rule = self.rule(one.path)
        if rule is not None:
            return [rule.axes]
        shown = self.shown(one)
        return [AS_IN_TORCH] if shown is None or shown == AS_IN_TORCH else [AS_IN_TORCH, shown]

    def rule(self, path: str) -> Convention | None:
        mine, theirs = self.torch_layers.get(path), self.flax_layers.get(self.partners[path].path)
        # The models themselves are given the same by the caller.
        return convention(mine, theirs) if path and mine and theirs else None

    def strange(self, one: ModuleCall) -> bool:
        """Whether the model's own run calls it with what is torch's in no order of axes."""
        return self.rule(one.path) is None and one.path != "" and bool(self.shapes(one)[1]) and self.shown(one) is None

    def shapes(self, one: ModuleCall) -> tuple[str, str]:
        """Of the values that the two modules are given, torch's in float64 and Flax's in its own run."""
        own = self.own.get((self.partners[one.path].path, one.call))
        given = [(one.args, one.kwargs), (own.args, own.kwargs) if own else ()]
        mine, theirs = (", ".join(str(array.shape) for array in values(tree)) for tree in given)
        return mine, theirs

    def shown(self, one: ModuleCall) -> Axes | None:
        """The order of axes by which the model's own run gives Flax's module most nearly what torch's gets."""
        own = self.own.get((self.partners[one.path].path, one.call))
        if own is None:
            return None
        pairs = list(zip(values((one.args, one.kwargs)), values((own.args, own.kwargs))))
        fitting = [axes for axes in USUAL if pairs and all(axes.to_flax(a).shape == b.shape for a, b in pairs)]
        return min(fitting, key=lambda axes: sum(distance(axes.to_flax(a), b) for a, b in pairs), default=None)

    def attempt(self, one: ModuleCall, axes: Axes) -> Trial:
        """Run the Flax module alone in one order of axes, its children answering as torch's did."""
        partner, rule = self.partners[one.path], self.rule(one.path)
        trial = Trial(one, self.plain[one.key], partner, axes, rule)
        arguments = self.arguments(one, axes, rule)
        trial.args, trial.kwargs = arguments.args, arguments.kwargs
        if arguments.kept:
            trial.note = f"{', '.join(arguments.kept)} as the Flax model itself gives it, because torch's has no such argument"
        told = self.told(one)
        free: set[str] = set()
        while True:
            answering = {name: calls for name, calls in told.items() if name not in free}
            replies = {self.partners[name].path: [reply for _, reply in calls] for name, calls in answering.items()}
            try:
                run = self.run_flax(trial, replies)
            except NotComparableError:
                raise
            except Exception as error:
                trial.error = f"{type(error).__name__}: {first_line(error)}"
                return trial
            # Called more or less often than in torch, or where no answer can be given: it runs for itself.
            unlike = {n for n, calls in answering.items() if run.seen.get(self.partners[n].path, 0) != len(calls)}
            if not unlike:
                break
            free |= unlike
        partly = {name for name, calls in told.items() if not all(self.answers_whole(call) for call, _ in calls)}
        trial.free = tuple(sorted(free | partly | {name for name, _ in self.below(one) if name not in told}))
        trial.replies = {name: [c.output for c, _ in calls] for name, calls in answering.items()}
        self.collect(trial, run, answering)
        return trial

    def run_flax(
        self,
        trial: Trial,
        replies: Mapping[str, list[Any]],
        *,
        weights: Mapping[str, np.ndarray] | None = None,
        **changes: Any,
    ) -> Alone:
        """The Flax module of a trial alone, with some of its arrays exchanged if asked."""
        given = trial.partner.path, trial.args, trial.kwargs, replies
        return self.subject.flax.alone(
            self.subject.flax_model,
            *given,
            dtype=self.dtype,
            quick=self.dtype is not None,
            weights={**self.torchs_inside(replies), **(weights or {})},
            **changes,
        )

    def torchs_inside(self, replies: Mapping[str, list[Any]]) -> dict[str, np.ndarray]:
        """What torch has in place of the arrays of the answering modules, by their path in Flax, where one is not torch's.

        A module may use an array of one that it calls, as a head does that is tied to the embedding: a wrong
        one is the fault of the module that holds it.
        """
        owners = {self.partners[name].path: name for name in self.partners}
        prefixes = tuple(f"{owners[path]}." for path in replies)
        inside = [one for one in self.subject.pairing.pairs if prefixes and one.source.array_path.startswith(prefixes)]
        if not any(one.source.array_path in self.unequal for one in inside):
            return {}
        try:
            return gathered((one.target, np.asarray(one.layout.apply(one.source.read()))) for one in inside)
        except ValueError:
            # Flax's array lies half inside, half outside.
            return {}

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """Torch's arrays by path, each with its counterpart in Flax."""
        return weights_of(self.subject.pairing.pairs, self.subject.torch.leaves(self.subject.torch_model))

    @cached_property
    def unequal(self) -> dict[str, Weight]:
        """Those whose counterparts are not the same numbers."""
        return {path: weight for path, weight in self.weights.items() if not weight.equal}

    def below(self, one: ModuleCall) -> list[tuple[str, list[ModuleCall]]]:
        """The nearest modules below that have partners, with their calls within this one."""
        found: dict[str, list[ModuleCall]] = {}
        for key in self.children.get(one.key, ()):
            found.setdefault(key[0], []).append(self.calls[key])
        return list(found.items())

    def told(self, one: ModuleCall) -> dict[str, list[tuple[ModuleCall, dict[str, np.ndarray]]]]:
        """What the children answer, in Flax's layout, by torch path."""
        paths = [self.partners[name].path for name, _ in self.below(one)]
        return {
            name: [(call, self.reply(call)) for call in calls]
            for name, calls in self.below(one)
            # Two torch modules that are one in Flax cannot be told apart.
            if paths.count(self.partners[name].path) == 1 and self.is_comparable(name)
        }

    def reply(self, one: ModuleCall) -> dict[str, np.ndarray]:
        """What torch's module returned, by path in what Flax's returns, whichever way that answers."""
        axes, rule = self.axes_of(one), self.rule(one.path)
        own = self.own.get((self.partners[one.path].path, one.call))
        known = aligned(one, arrays_by_path(own.output), axes) if own and not rule else None
        ways = rule.outputs if rule and rule.outputs else [known] if known is not None else None
        found = {}
        for path, leaf in flatten(one.output, is_array):
            for where in (names.get(path) for names in ways) if ways else [path]:
                if is_array(leaf) and where is not None:
                    found[where] = axes.to_flax(leaf)
        return found

    def answers_whole(self, one: ModuleCall) -> bool:
        """Whether torch's answer covers all that Flax's module returns, as far as the model's own run shows it."""
        own = self.own.get((self.partners[one.path].path, one.call))
        if own is None:
            return True
        reply = self.reply(one)
        # An answer of another shape is not used: the module runs for itself there.
        return all(
            path in reply and reply[path].shape == leaf.shape for path, leaf in flatten(own.output, is_array) if is_array(leaf)
        )

    def axes_of(self, one: ModuleCall) -> Axes:
        """The order of axes in which a child is called: as shown, among those in which it is right."""
        shown, right = self.orders(one)[-1], self.right.get(one.path, [])
        return shown if shown in right or not right else right[0]

    def arguments(self, one: ModuleCall, axes: Axes, rule: Convention | None) -> "Arguments":
        """What torch's module was given, as Flax's wants it.

        Raises:
            NotComparableError: the arguments do not fit.
        """
        mine = dict(flatten((one.args, dict(one.kwargs)), is_array))
        own = self.own.get((self.partners[one.path].path, one.call))
        plain_call = rule is None or (rule.arguments is None and rule.rewritten is dict)
        alike = own is None or set(mine) == {path for path, _ in flatten((own.args, dict(own.kwargs)), is_array)}
        if alike and plain_call:
            args, kwargs = mapped(lambda _, leaf: turned(axes, leaf), (one.args, dict(one.kwargs)))
            return Arguments(args, kwargs, {spoken(path): spoken(path) for path, leaf in mine.items() if is_array(leaf)})
        if own is None:
            assert rule is not None
            own = skeleton(one, rule)
        found = refilled(one, own, axes, rule)
        if rule is not None and lacking(by_argument(one, rule), found):
            # The model's own run gives it nothing that fits, or leaves one out, which is a fault of who calls it: the layer
            # itself is as the ledger knows it.
            found = refilled(one, skeleton(one, rule), axes, rule)
        if any(is_array(leaf) for leaf in mine.values()) and not set(found.sources) - {MASK}:
            shapes = ", ".join(str(leaf.shape) for leaf in mine.values() if is_array(leaf))
            raise NotComparableError(f"torch gives it {shapes}, Flax nothing of such shapes")
        return found

    def collect(self, trial: Trial, run: Alone, answering: Mapping[str, list[tuple[ModuleCall, Any]]]) -> None:
        """Put what torch and Flax produced side by side, by place, in torch's layout."""
        rule, axes = trial.rule, trial.axes
        outputs = dict(run.outputs)
        mine, plain = (dict(flatten(c.output, is_array)) for c in (trial.torch, trial.plain))
        names = rule.names(outputs) if rule else aligned(trial.torch, outputs, axes)
        for path, leaf in mine.items():
            where = path if names is None else names.get(path)
            if where is None:
                continue
            place = Place(None, 0, path)
            trial.expected[place], trial.noise[place] = leaf, plain.get(path)
            if where in outputs:
                trial.actual[place] = turned_back(axes, outputs.pop(where), leaf)
        for path in outputs if rule is None and names is None else ():
            trial.actual[Place(None, 0, path)] = outputs[path]
        for name, calls in answering.items():
            for number, (call, _) in enumerate(calls):
                self.collect_given(trial, run, name, number, call)
        blank = self.subject.padding.blank
        trial.expected, trial.noise, trial.actual = blank(trial.expected), blank(trial.noise), blank(trial.actual)

    def plain_call(self, call: ModuleCall) -> ModuleCall | None:
        """A call of torch's in the dtype of the model; None if it was not made there."""
        return self.plain.get(call.key)

    def collect_given(self, trial: Trial, run: Alone, name: str, number: int, call: ModuleCall) -> None:
        """What the module gives one call of a child, on both sides."""
        rule = trial.child_rules[name] = self.rule(name)
        mine = by_argument(call, rule)
        noted = self.plain_call(call)
        plain = by_argument(noted, rule) if noted else {}
        first, flax_path = self.axes_of(call), self.partners[name].path
        for axes in [first, *(other for other in self.right.get(name, []) if other != first)]:
            try:
                wanted = self.arguments(call, axes, rule)
            except NotComparableError:
                return
            given = {torch: run.given.get((flax_path, number, flax)) for flax, torch in wanted.sources.items()}
            if all(getattr(leaf, "shape", None) == axes.to_flax(mine[p]).shape for p, leaf in given.items() if p != MASK):
                break
        for path, leaf in given.items():
            place = Place(name, number, path)
            if path == MASK:
                trial.expected[place] = like(mine[path], leaf) if is_array(leaf) else mine[path]
                trial.actual |= {place: like(leaf.astype(bool), mine[path])} if is_array(leaf) else {}
                continue
            trial.expected[place], trial.noise[place] = mine[path], plain.get(path)
            if leaf is not None:
                known = rule is not None and axes == BATCH_FIRST and leaf.ndim == mine[path].ndim
                # Where the ledger knows that two axes are swapped, values that are not are others.
                trial.actual[place] = axes.to_torch(leaf) if known else turned_back(axes, leaf, mine[path])
        for path, setting in plain_arguments(call).items() if rule is None else ():
            theirs = run.given.get((flax_path, number, path))
            # What stands there in Flax as an array, or not at all, may mean the same.
            if type(theirs) is type(setting):
                place = Place(name, number, path)
                trial.expected[place], trial.actual[place] = setting, theirs


def lacking(mine: Mapping[str, np.ndarray], found: Arguments) -> bool:
    """Whether an array that torch gives a layer has no place among Flax's arguments, nor one that is the same."""
    placed = [mine[path] for path in set(found.sources.values()) - {MASK}]
    left = [array for path, array in mine.items() if path not in found.sources.values() and path != MASK]
    return not placed or any(not any(array_equal(array, one) for one in placed) for array in left if array.dtype.kind == "f")


def array_equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a, b)


def arrays_by_path(tree: Any) -> dict[str, np.ndarray]:
    return {path: leaf for path, leaf in flatten(tree, is_array) if is_array(leaf)}


def aligned(one: ModuleCall, outputs: Mapping[str, Any], axes: Axes) -> dict[str, str] | None:
    """Flax's path of each output, by torch's, where a module inside returns another tree of the same arrays.

    A port returns the features alone where torch's module returns the weights, or None, beside them: what
    one side does not return cannot be compared, and is missed by who takes it.

    Returns:
        The names, in the order of both trees; None if the paths are the same, if no array of either
        side has one of its shape on the other, or for the models themselves, whose users see the tree.
    """
    mine, theirs = arrays_by_path(one.output), {path: leaf for path, leaf in outputs.items() if is_array(leaf)}
    if set(mine) == set(theirs) or not one.path:
        return None
    names: dict[str, str] = {}
    for path, leaf in mine.items():
        left = (other for other in theirs if other not in names.values())
        where = next((other for other in left if theirs[other].shape in (axes.to_flax(leaf).shape, leaf.shape)), None)
        names |= {path: where} if where is not None else {}
    return names if len(names) == min(len(mine), len(theirs)) > 0 else None


def plain_arguments(one: ModuleCall) -> dict[str, Any]:
    """The numbers and words that a module is given, by their path in the call."""
    leaves = flatten((one.args, dict(one.kwargs)), is_array)
    return {spoken(path): leaf for path, leaf in leaves if isinstance(leaf, PLAIN)}


class Calls(Mapping[tuple[str, int], ModuleCall]):
    """Calls by path and number, whose arrays come into memory with the call that is asked for.

    Args:
        aside: the calls, with what stands for the arrays that were put aside.
    """

    def __init__(self, aside: list[ModuleCall]):
        self.aside = aside
        self.by_key = {c.key: c for c in aside}
        # A call is one object as long as anyone holds it.
        self.in_memory = weakref.WeakValueDictionary[tuple[str, int], ModuleCall]()

    def __getitem__(self, key: tuple[str, int]) -> ModuleCall:
        found = self.in_memory.get(key)
        if found is None:
            self.in_memory[key] = found = self.by_key[key].taken()
        return found

    def __contains__(self, key: object) -> bool:
        return key in self.by_key

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.by_key)

    def __len__(self) -> int:
        return len(self.by_key)


def observed(subject: Subject, dtype: str | None, shelf: Shelf) -> Calls:
    """Torch's calls in a dtype; None is that of the model.

    Raises:
        InputError: the model refuses its inputs.
    """
    try:
        with subject.torch.pinned():
            calls = subject.torch.observe(subject.torch_model, subject.call, dtype=dtype, keep=shelf.put)
    except Exception as error:
        raise InputError(f"the torch model refuses these inputs: {type(error).__name__}: {first_line(error)}") from error
    return Calls(calls)


def own_calls(subject: Subject, dtype: str | None, shelf: Shelf) -> Calls:
    """Flax's calls in its own run, which show how its modules want to be called; none if it raises."""
    try:
        calls = subject.flax.observe(subject.flax_model, subject.call, dtype=dtype, keep=shelf.put)
    except Exception:
        return Calls([])
    return Calls(calls)


def nearest_children(
    calls: Mapping[tuple[str, int], ModuleCall], paired: set[str]
) -> dict[tuple[str, int], list[tuple[str, int]]]:
    """By the call of a paired module, the calls of the nearest paired modules that it makes."""
    found: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for key, one in calls.items():
        above = one.inside
        while above is not None and above[0] not in paired:
            above = calls[above].inside
        if above is not None and key[0] in paired:
            found.setdefault(above, []).append(key)
    return found
