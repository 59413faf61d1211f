"""Questions about classes, which a walk over a model would otherwise ask for each attribute of each layer."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

Question = TypeVar("Question", bound=Callable[..., Any])


def asked_once(question: Question) -> Question:
    """The same question, answered once for each class: what a class is does not change."""
    return cast(Question, functools.lru_cache(maxsize=1024)(question))
