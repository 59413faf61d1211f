"""A model of one framework against what one of the other did, with that framework alone installed."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from parity.bundles.answers import Questions
from parity.bundles.dropping import from_facts
from parity.bundles.file import Bundle, read
from parity.bundles.recorded import Recorded
from parity.errors import InputError, NotRecordedError, listed
from parity.evidence.compare import checked_levels, checked_modes, climb
from parity.evidence.dropping import replayed_in_flax
from parity.evidence.input_sets import InputSet, climbed
from parity.evidence.notes import Note
from parity.evidence.numerics import Noise
from parity.evidence.padding import Padding
from parity.evidence.result import Report
from parity.evidence.subject import Subject
from parity.frameworks import describe, owner
from parity.weights.files import read_rename
from parity.weights.pairing import pair

OTHER = {"torch": "flax", "flax": "torch"}
NAMES = {"torch": "torch model", "flax": "Flax model"}


def replay(
    path: str | os.PathLike[str],
    model: Any,
    *,
    levels: Iterable[str] | None = None,
    modes: Iterable[str] = ("compiled", "eager"),
    rename: Mapping[str, str] | str | os.PathLike[str] | None = None,
    ignore: Iterable[str] = (),
    strict: bool = False,
    diagnose: bool = True,
) -> Report:
    """Tell whether a model is the same function as one of the other framework that was recorded.

    The levels, figures and words are those of `parity.compare`, and PyTorch is canonical whichever side was recorded.
    The arguments, the seed and the padding mask are those of the recording. What the file does not allow is 'not run',
    with the reason. The framework of the recorded model need not be installed.

    Args:
        path: of a file that `parity.record` wrote.
        model: of the other framework, in eval mode.
        levels: as in `parity.compare`; None takes all of them, without `wiring` where that would need a recorded Flax
            model to run once more.
        modes: as in `parity.compare`.
        rename: as in `parity.compare`: torch's names first, whichever side was recorded; or the path of a JSON file of it.
        ignore: as in `parity.compare`.
        strict: as in `parity.compare`.
        diagnose: as in `parity.compare`.

    Returns:
        The report; on failure with a trace and, as far as the recording allows, a diagnosis.

    Raises:
        InputError: the file cannot be used (all that is wrong with it), the model is of the framework that was recorded,
            or it cannot be compared as it stands.
        MissingFrameworkError: the model's framework is not installed.
    """
    ways, chosen = checked_modes(modes), checked_levels(levels)
    names = read_rename(Path(rename)) if isinstance(rename, str | os.PathLike) else rename
    side = Recorded(read(path))
    check_model(side.bundle, model)
    report = replayed({side.NAME: side, OTHER[side.NAME]: model}, chosen, ways, names, ignore, strict, diagnose)
    return without_wiring(report) if levels is None and side.NAME == "flax" else report


def without_wiring(report: Report) -> Report:
    """The report without a proof that would need the recorded Flax model once more, and a note that it is left out."""
    left = tuple(level for level in report.levels if (level.level, level.status) != ("wiring", "not run"))
    if len(left) == len(report.levels):
        return report
    text = "wiring is left out: the recorded Flax model would have to run on the numbers of torch's proof"
    return replace(report, levels=left, notes=(*report.notes, Note("recorded", "", text)))


def check_model(bundle: Bundle, model: Any) -> None:
    """Refuse what is no model of the framework that was not recorded.

    Raises:
        InputError: it is none.
    """
    room, wanted = owner(model), OTHER[bundle.side]
    if room is None or not room.is_model(model) or wanted != room.NAME:
        kinds = {"torch": "a torch.nn.Module", "flax": "a flax.nnx.Module or a parity.Linen"}
        raise InputError(
            f"{bundle.path} was recorded from {kinds[bundle.side]}; replay it against {kinds[wanted]}, got {describe(model)}"
            + ("; two recordings of one framework are compared by parity.bundle_diff" if room and wanted != room.NAME else "")
        )


def replayed(
    sides: Mapping[str, Any],
    levels: tuple[str, ...],
    modes: tuple[str, ...],
    rename: Mapping[str, str] | None = None,
    ignore: Iterable[str] = (),
    strict: bool = False,
    diagnose: bool = True,
) -> Report:
    """The report of two sides of which one at least is recorded.

    Args:
        sides: `torch` and `flax`, each a `Recorded` or a model.
        levels: to climb.
        modes: as in `replay`.
        rename: as in `replay`.
        ignore: as in `replay`.
        strict: as in `replay`.
        diagnose: as in `replay`.
    """
    bundles = [one.bundle for one in sides.values() if isinstance(one, Recorded)]
    ignored = (ignore,) if isinstance(ignore, str) else tuple(ignore)

    def climb_one(one: InputSet, first: bool, explain: bool) -> Report:
        subject = Replayed(sides, one, rename, ignored, gradients="gradients" in levels)
        wanted = levels if first else tuple(level for level in levels if level != "weights")
        if subject.masks is None:
            report = climb(subject, wanted, modes, strict, diagnose=diagnose and explain, trace=explain)
        else:
            with replayed_in_flax(subject, subject.masks):
                proved = tuple(level for level in wanted if level != "wiring")
                report = climb(subject, proved, modes, strict, spoil=False, diagnose=False, trace=explain)
        return replace(report, notes=(*subject.told(report), *report.notes))

    sets = sets_of(bundles)
    return climbed(sets[:1] if levels == ("weights",) else sets, climb_one)


def sets_of(bundles: list[Bundle]) -> list[InputSet]:
    """The recorded input sets, by name."""
    return [InputSet(told["name"], told["shows"], (), {}) for told in bundles[0].facts["sets"]]


def told_apart(one: Bundle, other: Bundle) -> list[str]:
    """Why two recordings are not of one comparison; one sentence each."""
    found = []
    if one.facts["seed"] != other.facts["seed"]:
        found.append(f"they have seeds {one.facts['seed']} and {other.facts['seed']}; record both with one seed")
    mine, theirs = ({told["name"]: told for told in bundle.facts["sets"]} for bundle in (one, other))
    if list(mine) != list(theirs):
        found.append(
            f"they have the input sets {', '.join(map(repr, mine))} and {', '.join(map(repr, theirs))}; record the same"
        )
    asked = Questions()
    for name in [name for name in mine if name in theirs]:
        place = f" of the input set {name!r}" if name else ""
        calls = [bundle.value(sets[name]["call"]) for bundle, sets in ((one, mine), (other, theirs))]
        if asked.of_call(calls[0]) != asked.of_call(calls[1]):
            found.append(f"the arguments{place} are not the same; record both on the same ones")
        if asked.spoken(one.value(mine[name]["padding mask"])) != asked.spoken(other.value(theirs[name]["padding mask"])):
            found.append(f"the padding masks{place} are not the same; record both with the same one")
        if (mine[name]["masks"] is None) != (theirs[name]["masks"] is None):
            found.append(f"one of them drops{place}, the other does not; replay the one that drops against the model itself")
    return found


class Replayed(Subject):
    """A pair of which one side, or both, are read from a bundle.

    Args:
        sides: `torch` and `flax`, each a `Recorded` or a model.
        one: the input set, by its name.
        rename: as in `parity.transfer`.
        ignore: as in `parity.transfer`.
        gradients: whether they are compared, if they were recorded.

    Raises:
        InputError: the model cannot be compared as it stands; all reasons at once.
    """

    def __init__(
        self,
        sides: Mapping[str, Any],
        one: InputSet,
        rename: Mapping[str, str] | None,
        ignore: tuple[str, ...],
        gradients: bool,
    ):
        self.recorded = frozenset(name for name, side in sides.items() if isinstance(side, Recorded))
        self.open(*(side for side in sides.values() if isinstance(side, Recorded)), one=one)
        self.gradients = self.native_gradients = self.gradients and gradients
        self.torch_model, self.flax_model = sides["torch"], sides["flax"]
        self.torch, self.flax = (
            side if isinstance(side, Recorded) else owner(side) for side in (sides["torch"], sides["flax"])
        )
        if "flax" not in self.recorded:
            self.flax_model = self.flax.with_call(self.flax_model, self.call)
        problems = [
            sentence.partition(", or compare it")[0]
            for name in sorted({"torch", "flax"} - self.recorded)
            for sentence in getattr(self, name).problems_before_running(getattr(self, f"{name}_model"), self.masks is not None)
        ]
        problems += self.dtype_problems()
        if problems:
            raise InputError(listed("cannot compare", problems))
        self.pairing = pair(
            *(self.torch_model, self.flax_model), rename=rename, ignore=ignore, names=(NAMES["torch"], NAMES["flax"])
        )

    def open(self, *sources: Recorded, one: InputSet) -> None:
        """Take from the recordings what both sides were given, and what they allow."""
        bundles = [source.bundle for source in sources]
        first = bundles[0]
        self.bundles = bundles
        told = next(told for told in first.facts["sets"] if told["name"] == one.name)
        self.call = first.value(told["call"])
        self.padding = Padding(first.value(told["padding mask"]))
        self.masks = from_facts(first.value(told["masks"]))
        self.seed, self.gradients = first.facts["seed"], all(bundle.facts["gradients"] for bundle in bundles)
        self.sampled = any(bundle.facts["keep"] != "all" for bundle in bundles)
        self.pins_checked, self.not_differentiable, self.dropping = False, {}, None
        self.unavailable = {}
        for bundle in bundles:
            if not bundle.facts["gradients"]:
                self.unavailable["gradients"] = f"{bundle.path.name} was recorded without gradients"
            elif bundle.facts["keep"] != "all":
                kept = bundle.facts["keep"]
                self.unavailable["gradients"] = f"{bundle.path.name} keeps {kept}, without gradients; record with keep='all'"
        self.native_gradients = self.gradients

    def told(self, report: Report) -> tuple[Note, ...]:
        """Where the recorded side comes from, and what a failure could not be asked about."""
        names = {"torch": "expected (torch)", "flax": "actual (flax)"}
        text = "; ".join(f"{names[bundle.side]} is read from {bundle.told}" for bundle in self.bundles)
        if not report.passed and "torch" in self.recorded:
            text += "; causes inside torch's code were not tried, for it cannot be run: parity.compare tries them"
        return (Note("recorded", "", text, {"keeps": [bundle.facts["keep"] for bundle in self.bundles]}),)

    # --- what is read in place of a run -------------------------------------------------------

    def kept(self, kind: str, *rest: Any) -> Any:
        return self.torch.answered(kind, self.call, rest, {})

    def noise(self, stage: str, kind: str, path: str) -> Noise:
        """As it was measured where torch was recorded."""
        found: Noise = self.kept("noise", stage, kind, path) if "torch" in self.recorded else super().noise(stage, kind, path)
        return found

    def wide_noise(self, kind: str, path: str) -> list[float]:
        """As it was measured where torch was recorded."""
        found: list[float] = self.kept("wide_noise", kind, path) if "torch" in self.recorded else super().wide_noise(kind, path)
        return found

    def unsettled(self, side: str, path: str) -> np.ndarray:
        """As it was measured where torch was recorded."""
        found: np.ndarray = self.kept("unsettled", side, path) if "torch" in self.recorded else super().unsettled(side, path)
        return found

    @property
    def native_cotangents(self) -> dict[str, np.ndarray] | None:
        """Those of the pair, if the recorded Flax model was run with the same: it returns the same tree then."""
        found = super().native_cotangents
        if found is None or "flax" not in self.recorded:
            return found
        try:
            self.flax.evaluate(self.flax_model, self.call, cotangents=found)
        except NotRecordedError:
            self.unavailable["gradients"] = "the outputs are not of one form, so their gradients cannot be compared"
            self.gradients = self.native_gradients = False
            self.__dict__.pop("cotangents", None)
            return None
        except Exception:
            # It was asked for gradients, and raised: that is for the level to tell.
            return found
        return found
