"""The line of the user's code that asked for something: libraries and this package are skipped."""

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import FrameType

import parity
from parity.evidence.faults import SourceLine

# Whose lines say nothing to a user: those of the frameworks, and of what stands between them and the user's code.
LIBRARIES = ("torch", "functorch", "jax", "jaxlib", "flax", "optax", "numpy", "einops", "jaxtyping", "beartype", "typeguard")
# Where this package hands over to the user's model: what called it is no part of the model.
DOORS = (("running.py", "evaluate"), ("isolation.py", "body"), ("recording.py", "body"))

# Where libraries keep what users call, below their folders.
PUBLIC: tuple[str, ...] = (
    "_src/nn",
    "_src/numpy",
    "_src/scipy",
    "_src/image",
    "_src/random",
    "nnx/nn",
    "linen",
    "torch/functional",
)
PUBLIC += ("nn/functional", "torch/nn/init", "torch/_tensor", "einops")

# File, function and line of a frame.
Frame = tuple[str, str, int]


@lru_cache(maxsize=4096)
def foreign(file: str) -> bool:
    """Whether a file belongs to a library, to Python itself or to this package."""
    return file.startswith("<frozen") or file == "<string>" or file.startswith(directories())


@lru_cache(maxsize=1)
def own() -> str:
    return os.path.dirname(os.path.abspath(parity.__file__)) + os.sep


def directories() -> tuple[str, ...]:
    """The folders of what is foreign, of the libraries that are imported."""
    found = [own()]
    for name in LIBRARIES:
        file = getattr(sys.modules.get(name), "__file__", None)
        found += [os.path.dirname(os.path.abspath(file)) + os.sep] if file else []
    # Python's own modules; what is installed beside them is somebody's code.
    return (*found, *(os.path.join(standard_library(), name) for name in ("functools.py", "contextlib.py", "typing.py")))


@lru_cache(maxsize=1)
def standard_library() -> str:
    return sysconfig.get_paths()["stdlib"]


def innermost(frames: Iterable[Frame]) -> tuple[SourceLine | None, str]:
    """The innermost line of the user's code, and the function of a library that it calls, '' if it calls none.

    Args:
        frames: the innermost first.
    """
    called = ""
    for file, function, line in frames:
        if at_the_door(file, function):
            return None, called
        if not foreign(file):
            return SourceLine(file, line, linecache.getline(file, line).strip()), called
        if not file.startswith(own()) and telling(file, function):
            called = function.rpartition(".")[2] if "__call__" not in function else function.partition(".")[0]
    return None, called


def at_the_door(file: str, function: str) -> bool:
    base = os.path.basename(file)
    name = function.rpartition(".")[2]
    return file.startswith(own()) and (base, name) in DOORS


def telling(file: str, function: str) -> bool:
    """Whether the name of a library's function says something to its user: it is one that is called by that name."""
    last = function.rpartition(".")[2]
    public = any(f"{os.sep}{room}{os.sep}" in file or file.endswith(f"{os.sep}{room}.py") for room in PUBLIC)
    return public and "<" not in function and not last.startswith("_") and last not in ("forward", "reduce", "ufunc")


def of_python(frame: FrameType | None) -> Iterator[Frame]:
    """The frames of the running thread from one outwards."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno
        frame = frame.f_back


def caller() -> SourceLine | None:
    """The innermost line of the user's code that is running now."""
    return innermost(of_python(sys._getframe(1)))[0]
