"""The modules of a model as a tree, each with what a report knows of it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from parity.evidence.faults import Cause, Isolated
    from parity.evidence.result import Report, Step

Mark = Literal["agrees", "differs", "first divergence", "wrong", "not compared", ""]
# From what calls for attention to what does not.
MARKS: tuple[Mark, ...] = ("wrong", "first divergence", "differs", "not compared", "agrees", "")


@dataclass
class Node:
    """One module.

    Attributes:
        name: the last part of its path.
        path: in torch's words; '' is the model.
        steps: its calls, in the run of the whole model.
        isolated: its calls, each run alone.
        causes: what would explain what is wrong with it, best first.
        first: whether the models part here.
        alone: `torch only` or `flax only` for a module without a counterpart, with what else is known of that.
        children: modules inside, in the order in which they are called.
    """

    name: str
    path: str
    steps: list["Step"] = field(default_factory=list)
    isolated: list["Isolated"] = field(default_factory=list)
    causes: tuple["Cause", ...] = ()
    first: bool = False
    alone: str = ""
    children: list["Node"] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """The largest difference over what rounding explains, in the run of the whole model; None if it was not compared."""
        return max((step.ratio for step in self.steps), default=None)

    @property
    def mark(self) -> Mark:
        """What a reader must see of it."""
        if any(one.status == "differs" for one in self.isolated):
            return "wrong"
        if self.first:
            return "first divergence"
        if self.steps:
            return "agrees" if all(step.agrees for step in self.steps) else "differs"
        return "not compared" if self.alone else ""

    @property
    def worst_inside(self) -> Mark:
        """The mark, of its own or of a module inside it, that calls most for attention."""
        return min((node.mark for node in self.walk()), key=MARKS.index)

    def walk(self) -> Iterator["Node"]:
        """The module and all that are inside it."""
        yield self
        for child in self.children:
            yield from child.walk()


def module_tree(report: "Report") -> Node | None:
    """The model with its modules in the order of their first calls; None if no module was looked at."""
    trace, diagnosis = report.trace, report.diagnosis
    isolation = diagnosis.isolation if diagnosis else None
    steps = list(trace.steps) if trace else []
    pairs = list(isolation.modules) if isolation else []
    alone = dict(sides(trace.unpaired if trace else ()))
    paths = list(dict.fromkeys([*(s.path for s in steps), *(p.path for p in pairs), *alone]))
    if not paths:
        return None
    nodes = {"": Node("", "")}
    for path in paths:
        grown(nodes, path)
    for step in steps:
        nodes[step.path].steps.append(step)
    for one in pairs:
        nodes[one.path].isolated.append(one)
    for path, side in alone.items():
        nodes[path].alone = side
    if diagnosis:
        for node in nodes.values():
            node.causes = diagnosis.causes_of(node.path)
    found = trace.first_divergence() if trace else None
    if found:
        nodes[found.path].first = True
    return nodes[""]


def grown(nodes: dict[str, Node], path: str) -> None:
    """Add a module and those that it lies in."""
    parts = path.split(".") if path else []
    for depth in range(1, len(parts) + 1):
        here, above = ".".join(parts[:depth]), ".".join(parts[: depth - 1])
        if here not in nodes:
            nodes[here] = Node(parts[depth - 1], here)
            nodes[above].children.append(nodes[here])


def sides(unpaired: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Path and side of what has no counterpart, out of the sentences that name it."""
    for sentence in unpaired:
        path, _, rest = sentence.partition(" (")
        yield "" if path == "the model" else path, rest.replace(")", "")
