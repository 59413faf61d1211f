"""Draw the pictures of docs/pictures: the page of a pair that differs and of one that agrees, in light and dark.

Usage: .venv/bin/python scripts/pictures.py; needs the Chromium of the system.
"""

import io
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import jax
import numpy as np
import torch
from flax import nnx
from PIL import Image
from playwright.sync_api import sync_playwright

import parity

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
WIDTH, HEIGHT = 1100, 900
# Colours of a picture: few are needed, and the files stay small.
COLOURS = 128


def report(agrees: bool) -> parity.Report:
    """The pair of docs/index.md: a GELU that is torch's, or Flax's default, which is another."""
    torch.manual_seed(0)
    gelu = partial(jax.nn.gelu, approximate=False) if agrees else nnx.gelu
    ours = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)).eval()
    theirs = nnx.Sequential(nnx.Linear(8, 32, rngs=nnx.Rngs(0)), gelu, nnx.Linear(32, 8, rngs=nnx.Rngs(0)))
    parity.transfer(ours, theirs)
    return parity.compare(ours, theirs, np.random.default_rng(0).standard_normal((4, 5, 8), dtype=np.float32))


def drawn() -> None:
    """Write the pictures."""
    browser = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit("no Chromium on this machine: install the package chromium")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as tools:
        chromium = tools.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        for name, agrees in (("differs", False), ("agrees", True)):
            page = report(agrees).save_html(Path(folder) / f"{name}.html", title="torch.nn.Sequential against nnx.Sequential")
            for scheme in ("light", "dark"):
                options = {"viewport": {"width": WIDTH, "height": HEIGHT}, "color_scheme": scheme}
                tab = chromium.new_context(**options).new_page()
                tab.goto(page.as_uri())
                whole = not agrees and scheme == "light"
                # What nobody looks at is not drawn.
                for box in tab.locator("[data-pictures], [data-course]").all() if whole else ():
                    box.scroll_into_view_if_needed()
                    tab.wait_for_timeout(1000)
                tab.evaluate("scrollTo(0, 0)")
                shown = Image.open(io.BytesIO(tab.screenshot(full_page=whole)))
                shown.convert("RGB").quantize(COLOURS).save(FOLDER / f"{name}-{scheme}.png", optimize=True)
        chromium.close()


if __name__ == "__main__":
    drawn()
