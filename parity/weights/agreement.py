"""The settings of all pairs of layers, and what their disagreements come to."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from parity.said import Said
from parity.weights.claims import Layers, Sides
from parity.weights.leaf import ROOT, Layer
from parity.weights.mirrors import mirror_problems
from parity.weights.paths import Rename, bare, fits
from parity.weights.rules import disagreements, in_words_of, refusals, remarks, row_of
from parity.weights.unpaired import bare_wrappers


@dataclass(frozen=True)
class Told:
    """What the settings of all pairs of layers come to, one sentence each."""

    disagreeing: list[str]
    refused: list[str]
    notes: list[str]
    accepted: list[str] = field(default_factory=list)

    def accepting(self, patterns: Iterable[str]) -> "Told":
        """The same, without the disagreements that the caller knows of."""
        chosen = tuple(patterns)
        known = [one for one in self.disagreeing if any(fits(n, p) for n in setting_names(one) for p in chosen)]
        return replace(self, disagreeing=[one for one in self.disagreeing if one not in known], accepted=known)

    def left_out(self) -> list[str]:
        """What a reader must know of that."""
        told = "a setting is left out of the verdict, as asked"
        return [Said("setting-left-out", f"{told}: {sentence}") for sentence in dict.fromkeys(self.accepted)]


def setting_names(sentence: str) -> tuple[str, ...]:
    """The names by which `ignore` means a disagreement: torch's path of the layer, a dot, and the setting told first.

    Of the model itself it is the setting alone, and what a pattern for any layer fits.
    """
    path, _, rest = sentence.partition(": ")
    name = rest.partition("=")[0].strip()
    if not name.isidentifier():
        return ()
    return (name, f".{name}") if path == ROOT else (f"{path}.{name}",)


def settings(layers: Layers, renames: Rename, sides: Sides) -> Told:
    """Disagreements of all layers that both sides have under one path."""
    told = Told([], [], [])
    if sides[0] == sides[1]:
        return told
    other, wrapped = dict[str, list[Layer]](), set[str]()
    # A layer that only its name tells has no settings.
    mine_known, theirs_known = ([layer for layer in one if not layer.by_name] for one in layers)
    exact = {path for layer in theirs_known for path in (layer.path, layer.own_path)}
    for layer in theirs_known:
        further = [path for path in layer.also if path not in exact]
        for path in dict.fromkeys((layer.path, layer.own_path, *further)):
            other.setdefault(path, []).append(layer)
    for layer in mine_known:
        paths = dict.fromkeys((layer.path, layer.own_path, *layer.also))
        names = [*(bare(renames.apply(path)[0]) for path in paths), layer.path, *layer.also]
        for twin in next((other[name] for name in names if name in other), []):
            mine, theirs = (layer, twin) if sides[0] == "torch" else (twin, layer)
            row = row_of(mine.kinds, theirs.kinds)
            wrong = [*disagreements(row, mine, theirs), *([] if row else mirror_problems(mine, theirs))]
            told.disagreeing.extend(in_words_of(theirs, sentence) for sentence in wrong)
            told.refused.extend(in_words_of(theirs, sentence) for sentence in refusals(row, mine, theirs))
            told.notes.extend(in_words_of(theirs, sentence) for sentence in remarks(row, mine, theirs))
            wrapped |= {theirs.own_path} if row else set()
    told.refused.extend(bare_wrappers(layers[sides.index("flax")], wrapped))
    return told
