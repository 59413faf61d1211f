"""A Linen model as one object: Linen itself keeps the module and its numbers apart."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from parity.frameworks import load


class Linen:
    """A Linen module with its variables, for every place where a Flax model is taken.

    Linen never changes an object: a transfer into one gives a new one as `Transfer.value`, whose
    `variables` have the type, the tree and the boxes (`nn.Partitioned`) of the old ones.

    Args:
        module: a `flax.linen.Module`, not bound.
        variables: what `module.init` returns: a dict or FrozenDict of collections, with arrays or
            `jax.ShapeDtypeStruct` in it. None makes abstract ones, as `jax.eval_shape` of `init` does:
            a transfer then fills them, and no initialiser ever runs.
        args: example arguments, of which shapes and dtypes count. By one call on shapes alone the
            layers of a `@compact` module are known; `parity.compare` uses its own arguments for that.
        method: the method that is the model, a function or its name; None is `__call__`.
        rngs: random keys by stream, given to every call.
        kwargs: keyword arguments of every call, for what the Flax side alone is told: `train=False`,
            `deterministic=True`. Those given to `parity.compare` are added and win.

    Raises:
        InputError: `module` is no Linen module, `variables` are no collections, or the module cannot
            be initialised on the example arguments.
        MissingFrameworkError: flax is not installed.
    """

    def __init__(
        self,
        module: Any,
        variables: Any = None,
        *args: Any,
        method: str | Callable[..., Any] | None = None,
        rngs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.module, self.args, self.kwargs, self.method, self.rngs = module, args, kwargs, method, dict(rngs or {})
        room = load("linen")
        room.check_parts(self, variables)
        self.variables = variables
        if variables is None:
            # One call gives both.
            self.variables, self.structure = room.abstract(self)

    @cached_property
    def structure(self) -> Any:
        """The modules inside and their paths, found once."""
        return load("linen").structure_of(self)

    @cached_property
    def wide_structure(self) -> Any:
        """`structure` in a float64 run, found once."""
        return load("linen").wide_structure_of(self)

    def replaced(self, variables: Any = None, args: tuple[Any, ...] | None = None, kwargs: Any = None) -> "Linen":
        """The same model with other variables or arguments; this one stays as it is."""
        args = self.args if args is None else args
        kwargs = self.kwargs if kwargs is None else kwargs
        variables = self.variables if variables is None else variables
        new = Linen(self.module, variables, *args, method=self.method, rngs=self.rngs, **kwargs)
        if "structure" in vars(self) and load("linen").same_shapes(self, new):
            new.structure = self.structure
        return new

    def __repr__(self) -> str:
        return f"parity.Linen({type(self.module).__name__}, {', '.join(self.variables) or 'no variables'})"
