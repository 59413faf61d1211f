"""Reports of every kind, made once for all tests of the faces, and the text of a page."""

import re
from functools import lru_cache
from html.parser import HTMLParser

import optax
import torch
from evidence_pairs import attention, attention_inputs, normal, two

import parity


class Words(HTMLParser):
    """The text of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.text, self.silent = "", 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.silent += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.silent -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        self.text += "" if self.silent else data


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@lru_cache(maxsize=1)
def passing() -> parity.Report:
    return parity.compare(*two(), normal(3, 4), levels=["weights", "structure", "wiring", "identical"])


@lru_cache(maxsize=1)
def failing() -> parity.Report:
    return parity.compare(*attention("scale"), *attention_inputs(), levels=["weights", "structure", "identical"])


@lru_cache(maxsize=2)
def trained(alike: bool = True) -> parity.Report:
    """Three steps of training; else with a weight decay that Flax does not have: the functions agree, the training does not."""
    optimizer = (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.3})
    recipe = parity.Recipe() if alike else parity.Recipe(transformation=optax.adamw(0.05, weight_decay=0.0))
    asked = {"levels": ["weights", "identical", "training"], "steps": 3, "optimizer": optimizer, "loss": "square"}
    return parity.compare(*two(), normal(3, 4), recipe=recipe, **asked)
