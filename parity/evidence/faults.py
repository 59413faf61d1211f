"""Which modules are wrong for themselves, and why: frozen values that can print themselves."""

from dataclasses import dataclass
from typing import Any, Literal

from parity.errors import DivergenceError


@dataclass(frozen=True)
class Difference:
    """One value that a module, run alone, computes otherwise.

    Attributes:
        where: an output, or what the module gives one that it calls.
        ratio: the largest difference over what rounding explains.
        differing: how many values differ, and `elements`, of how many.
        worst: index of the largest difference beyond what rounding explains there.
        flax: the value there.
        torch: the value there.
        difference: between them; the smallest absolute tolerance that would have let those pass that differ.
        reason: in words, where it is no matter of numbers: a shape, a missing output, NaN.
    """

    where: str
    ratio: float
    differing: int = 0
    elements: int = 0
    worst: tuple[int, ...] = ()
    flax: float = 0.0
    torch: float = 0.0
    difference: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code.

    Attributes:
        file: its path.
        line: number of the line, from 1.
        text: what stands there, without the blanks around it; '' if the file cannot be read.
    """

    file: str
    line: int
    text: str = ""


@dataclass(frozen=True)
class Spot:
    """An operation of one side, and the line of the user's code that asks for it.

    Attributes:
        operation: what torch's dispatcher or jax's primitive calls it; '' where a value is passed on as it is.
        within: the function of the library that the line calls, if that has another name.
        source: the line; None if the layer is the framework's own and no code of the user calls it.
    """

    operation: str
    within: str = ""
    source: SourceLine | None = None


@dataclass(frozen=True)
class FirstOperation:
    """The first operation of a wrong module whose result the other side does not have, although it has its operands.

    Attributes:
        torch: the operation in torch; None if there is none.
        flax: what stands for it in Flax; None if there is none.
        where: the place at which the difference shows.
        note: how they differ, if it is no other number; or why no operation can be named.
    """

    torch: Spot | None
    flax: Spot | None
    where: str = ""
    note: str = ""


@dataclass(frozen=True)
class Isolated:
    """One call of one pair of modules, run alone on what torch's was given.

    Attributes:
        path: of the torch module.
        call: which call of it, from 0.
        flax_path: of the Flax module, in torch's words.
        decided_by: whether names, the transfer's plan or the order of calls made them a pair.
        status: `follows` if it differs, but may do so because of a module inside it that is wrong
            and could not answer as torch's did.
        ratio: the largest difference over what rounding explains.
        differences: what it computes otherwise, worst first.
        between: whether it calls other modules, all of which answered as torch's did, so that the
            fault is in its own code between them.
        note: why it could not be compared, or what a reader must know.
        operation: the first operation that differs; None unless the module is wrong for itself, and for all but the
            first few of those.
    """

    path: str
    call: int
    flax_path: str
    decided_by: Literal["name", "plan", "call order"]
    status: Literal["agrees", "differs", "follows", "not comparable"]
    ratio: float = 0.0
    differences: tuple[Difference, ...] = ()
    between: bool = False
    note: str = ""
    operation: FirstOperation | None = None


@dataclass(frozen=True)
class Isolation:
    """Every pair of modules, each judged for itself.

    Attributes:
        modules: one for each call of each pair, in the order in which torch's modules finish.
        unpaired: modules of one side without a partner.
        dtype: in which both ran.
    """

    modules: tuple[Isolated, ...]
    unpaired: tuple[str, ...] = ()
    dtype: str = "float64"

    @property
    def passed(self) -> bool:
        """Whether every pair that could be compared agrees."""
        return all(one.status in ("agrees", "not comparable") for one in self.modules)

    @property
    def faults(self) -> tuple[Isolated, ...]:
        """The modules that are wrong for themselves, each once, with the call that shows it most."""
        worst: dict[str, Isolated] = {}
        for one in self.modules:
            if one.status == "differs" and (one.path not in worst or one.ratio > worst[one.path].ratio):
                worst[one.path] = one
        return tuple(worst.values())

    def raise_for_divergence(self) -> None:
        """Raise the modules that are wrong, if there are any.

        Raises:
            DivergenceError: a pair differs.
        """
        if not self.passed:
            raise DivergenceError(str(self))

    def __str__(self) -> str:
        from parity.report.text import isolation_text

        return isolation_text(self)

    def to_dict(self) -> dict[str, Any]:
        """The result for machines."""
        from parity.report.data import document

        return document("isolation", self)


@dataclass(frozen=True)
class Cause:
    """A hypothesis under which a difference vanishes.

    Attributes:
        hypothesis: its name.
        path: of the module, in torch's words.
        what: what the Flax module does.
        change: what to write in its code instead.
        before: the largest difference that it explains, over what rounding explains.
        after: what is left of it when torch's module does the same.
        explains: the places whose difference is gone.
        complete: whether nothing else differs in that module.
        tried_on: whose module was run again to see; Flax's where torch's is read from a bundle.
    """

    hypothesis: str
    path: str
    what: str
    change: str
    before: float
    after: float
    explains: tuple[str, ...]
    complete: bool
    tried_on: Literal["torch", "flax"] = "torch"


@dataclass(frozen=True)
class Diagnosis:
    """Why two models differ.

    Attributes:
        causes: by module in torch's order, the best first; those that fit equally well all stand there.
        isolation: which modules are wrong.
        unexplained: wrong modules for which no hypothesis explains everything, with what is left.
        tried: how many variants were computed.
        notes: hypotheses that could not be tried, with the reason.
        settings: what the ledger finds to disagree between layers, whether these inputs show it or not.
    """

    causes: tuple[Cause, ...]
    isolation: Isolation
    unexplained: tuple[str, ...] = ()
    tried: int = 0
    notes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there is nothing to explain."""
        return self.isolation.passed

    def causes_of(self, path: str) -> tuple[Cause, ...]:
        """The causes found for one module, the best first."""
        return tuple(cause for cause in self.causes if cause.path == path)

    def __str__(self) -> str:
        from parity.report.text import diagnosis_text

        return diagnosis_text(self)

    def to_dict(self) -> dict[str, Any]:
        """The result for machines."""
        from parity.report.data import document

        return document("diagnosis", self)
