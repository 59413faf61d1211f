"""The page of a comparison: it says what the terminal says, needs no network, and works in a browser."""

import importlib.util
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evidence_pairs import attention, attention_inputs, normal, two
from typer.testing import CliRunner

import parity
from parity.cli import app
from parity.evidence.pictures import ERRORS, MAGNITUDES, picture
from parity.evidence.result import Divergence, LevelResult, Report, Step, Trace
from parity.report.html import fragment, report_page

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: install the package chromium")


class Words(HTMLParser):
    """The text of a page, what it links to, and its tags."""

    def __init__(self, page: str):
        super().__init__()
        self.text, self.links, self.silent, self.open = "", list[str](), 0, list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.silent += tag in ("script", "style")
        self.links += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in ("meta", "link", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.silent -= tag in ("script", "style")
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if self.silent else data


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.fixture(scope="module")
def failing() -> Report:
    return parity.compare(*attention("scale"), *attention_inputs())


@pytest.fixture(scope="module")
def page(failing: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return failing.save_html(tmp_path_factory.mktemp("page") / "report.html", title="attention")


# ----------------------------------------------------------------------------- its words


def test_the_page_says_what_the_terminal_says(failing, page):
    words = Words(page.read_text(encoding="utf-8"))
    assert not words.open
    said = squeezed(words.text)
    for line in str(failing).splitlines():
        for part in re.split(r"\s{3,}|FAILED|: (?=output|args)", line.strip()):
            # The page lists its notes one by one, and has a column for the sign.
            sentence = squeezed(part).strip().removeprefix("note: ").removeprefix("cause: ").removeprefix("change: ")
            sentence = sentence.removeprefix("next: ").removeprefix("seed 0").removesuffix(" ok").removesuffix(" n/a")
            if (
                sentence
                and "other cause" not in sentence
                and not re.match(r"and \d+ more", sentence)
                and not re.match(r"\w+\s+(ok|n/a)", sentence)
            ):
                assert sentence in said, sentence


def test_nothing_on_the_page_comes_from_elsewhere(page):
    text = page.read_text(encoding="utf-8")
    assert Words(text).links == ["#main"]
    assert "@import" not in text and "url(" not in re.search(r"<style>(.*?)</style>", text, re.DOTALL).group(1)


def test_names_are_text_and_never_markup():
    name = '</script><img src=x onerror="alert(1)">'
    step = Step(name, 0, False, 3.0, Divergence(name, 0, "", None, 1, 2, 3.0, (0,), 1.0, 2.0, 1.0, "", 1.0))
    report = Report((LevelResult("identical", "failed", name),), Trace((step,)), {name: name})
    text = report_page(report, name)
    assert name not in text and "<img" not in text
    assert squeezed(name) in squeezed(Words(text).text)


def test_a_report_without_a_trace_and_one_that_agrees_have_a_page():
    report = parity.compare(*two(), normal(3, 4), levels=["identical"])
    words = squeezed(Words(report_page(report)).text)
    assert str(report).splitlines()[0] in words and "Modules" not in words and "Next" not in words


def test_infinite_and_missing_figures_have_a_page():
    wrong = Step("a", 0, False, float("inf"), Divergence("a", 0, "", None, reason="NaN on one side"))
    text = report_page(Report((LevelResult("identical", "failed", "nan"),), Trace((wrong,), ("b (torch only)",))))
    assert "no bound" in text and "torch only" in text and "Infinity" not in text
    json.loads(re.search(r'id="drawn">(.*?)</script>', text, re.DOTALL).group(1))


# ----------------------------------------------------------------------------- pictures


def test_a_picture_counts_every_value_once_and_shows_where_the_error_is():
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((2, 50, 70))
    actual = expected.copy()
    actual[1, 30, 69] += 2e-3
    actual[0, 0, 0] = np.nan
    drawn = picture("[0]", expected, actual, 1e-9)
    assert sum(drawn.histogram) + drawn.equal == expected.size and drawn.equal == expected.size - 2
    assert np.array(drawn.by_magnitude).shape == (MAGNITUDES, len(ERRORS) + 1)
    assert tuple(np.array(drawn.by_magnitude).sum(0)) == drawn.histogram
    # 1e-3 is a million times the allowed; the NaN is beyond every bin.
    assert (
        drawn.histogram[int(np.searchsorted(ERRORS, 6.0)) + (0 if abs(actual[1, 30, 69] - expected[1, 30, 69]) < 1e-3 else 1)]
        == 1
    )
    assert drawn.histogram[-1] == 1
    cells = np.array(drawn.map)
    assert drawn.axes == (1, 2) and cells.shape == (24, 32)
    assert set(zip(*(axis.tolist() for axis in np.nonzero(cells)), strict=True)) == {(0, 0), (14, 31)}


@pytest.mark.parametrize("shape", [(), (5,), (3, 1), (1, 1, 1)])
def test_small_arrays_are_drawn(shape):
    expected = np.ones(shape)
    drawn = picture("", expected, expected + 1e-6, 1e-9)
    assert sum(drawn.histogram) == expected.size and np.array(drawn.map).max() == pytest.approx(1e3, rel=1e-2)


def test_nothing_is_drawn_of_nothing():
    assert picture("", np.ones((0, 3)), np.ones((0, 3)), 1.0) is None
    assert picture("", np.ones(3), np.ones(4), 1.0) is None
    assert picture("", np.ones(3), np.ones(3), 0.0) is None


# ----------------------------------------------------------------------------- notebook


def test_a_notebook_shows_the_same_words(failing):
    for result in (failing, failing.trace, parity.diff(np.ones(3), np.zeros(3)), parity.transfer(*two())):
        words = squeezed(Words(result._repr_html_()).text)
        first = squeezed(
            str(result).splitlines()[0] if not isinstance(result, parity.Transfer) else str(result).splitlines()[-1]
        )
        assert first in words
    assert "scale" in fragment(failing)


def test_a_notebook_without_jinja2_shows_the_text(failing, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert failing._repr_html_() is None


# ----------------------------------------------------------------------------- what goes wrong


def test_what_keeps_a_page_from_being_written_is_told_at_once(failing, tmp_path, monkeypatch):
    with pytest.raises(parity.InputError, match=r"is a folder; give the name of a file in it, such as .*report\.html"):
        failing.save_html(tmp_path)
    with pytest.raises(parity.InputError, match=r"there is no folder .*nowhere; make it first"):
        failing.save_html(tmp_path / "nowhere" / "report.html")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        parity.InputError, match=r"a page needs jinja2 and plotly, which are not installed: pip .*; there is no folder"
    ):
        parity.html_ready(tmp_path / "nowhere" / "report.html")
    assert not list(tmp_path.iterdir())


def test_a_page_that_cannot_be_written_leaves_the_old_one(failing, tmp_path, monkeypatch):
    old = tmp_path / "report.html"
    old.write_text("old")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(parity.InputError, match=r"could not be written: No space left on device; it is as it was"):
        failing.save_html(old)
    monkeypatch.undo()
    assert old.read_text() == "old" and list(tmp_path.iterdir()) == [old]


def test_the_suite_has_a_page_and_the_command_line_writes_it(tmp_path):
    target = tmp_path / "suite.html"
    done = CliRunner().invoke(
        app, ["check", "--module", "FeedForward", "--levels", "weights,structure", "--html", str(target), "--json"]
    )
    assert done.exit_code == 0, done.output
    words = Words(target.read_text(encoding="utf-8"))
    result = json.loads(done.stdout)
    assert not words.open and all(case["name"] in words.text for case in result["cases"])
    assert f"{len(result['cases'])} of {len(result['cases'])} cases agree" in words.text
    refused = CliRunner().invoke(app, ["check", "--html", str(tmp_path)])
    assert refused.exit_code != 0 and isinstance(refused.exception, parity.InputError)


# ----------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Any:
    from playwright.sync_api import sync_playwright

    # What a browser does besides, on a machine without a network.
    quiet = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync")
    with sync_playwright() as tools:
        chromium = tools.chromium.launch(executable_path=CHROMIUM, args=[*quiet, "--disable-component-update"])
        yield chromium
        chromium.close()


def opened(browser: Any, path: Path, **options: Any) -> tuple[Any, list[str]]:
    tab = browser.new_context(viewport={"width": 1200, "height": 900}, **options).new_page()
    told: list[str] = []
    tab.on("pageerror", lambda error: told.append(str(error)))
    tab.on("console", lambda message: told.append(message.text))
    tab.on(
        "request", lambda request: told.append(request.url) if not request.url.startswith(("file:", "data:", "blob:")) else None
    )
    tab.goto(path.as_uri())
    return tab, told


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_screen_shows_the_verdict_and_the_ladder_and_pictures_are_drawn(browser, page, failing, scheme):
    tab, told = opened(browser, page, color_scheme=scheme)
    assert tab.locator("h1").inner_text().endswith("NOT the same function")
    for level in failing.levels:
        row = tab.locator(".ladder tbody tr", has=tab.locator("th", has_text=level.level))
        assert level.summary in row.inner_text()
    assert tab.locator(".ladder").first.bounding_box()["y"] < 300
    wrong = tab.locator("li[data-mark=wrong] > details > .figures > .pictures").first
    wrong.scroll_into_view_if_needed()
    tab.wait_for_function("box => box.querySelectorAll('.chart svg').length >= 3", arg=wrong.element_handle())
    # Every picture has its words.
    assert all(tab.locator(".chart").evaluate_all("charts => charts.map(c => c.getAttribute('aria-label'))"))
    styles = "[document.body, document.documentElement].map(e => getComputedStyle(e)).map(s => [s.color, s.backgroundColor])"
    colours = tab.evaluate(styles)
    ink, paper = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (colours[0][0], colours[1][1]))
    assert (ink > paper) is (scheme == "dark")
    assert not told


@needs_browser
def test_the_page_is_used_by_keyboard_alone(browser, page):
    tab, told = opened(browser, page)
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "to the result"
    field = tab.locator("input[data-filter='r0-tree']")
    for _ in range(40):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.dataset.filter") == "r0-tree":
            break
    assert tab.evaluate("document.activeElement.dataset.filter") == "r0-tree"
    tab.keyboard.type("core")
    assert tab.locator("#r0-tree li:not([hidden]) > details > summary .name").all_inner_texts() == ["the model", "core"]
    assert tab.locator("[data-count='r0-tree']").inner_text() == "1 of 6 shown"
    field.fill("")
    closed = tab.locator("#r0-tree details.module:not([open])").first
    closed.locator("summary").first.focus()
    before = tab.locator("#r0-tree details[open]").count()
    tab.keyboard.press("Enter")
    assert tab.locator("#r0-tree details[open]").count() == before + 1
    assert not told


@needs_browser
def test_a_thousand_modules_are_readable_and_only_what_is_seen_is_drawn(browser, tmp_path, failing):
    drawn = next(step.pictures for step in failing.trace.steps if step.pictures)
    steps = [
        Step(f"layers.{i}.{name}", 0, i < 400, 10.0 ** (i % 9 - 4), pictures=drawn) for i in range(500) for name in ("a", "b")
    ]
    report = Report((LevelResult("identical", "failed", "many"),), Trace(tuple(steps)))
    target = report.save_html(tmp_path / "many.html")
    assert target.stat().st_size < 12e6
    tab, told = opened(browser, target)
    tab.get_by_role("button", name="Open all").click()
    tab.wait_for_function("document.querySelectorAll('.chart svg').length > 0")
    assert tab.locator(".chart").count() < 60
    tab.locator("input[data-filter='r0-tree']").fill("layers.499.b")
    assert tab.locator("[data-count='r0-tree']").inner_text() == "1 of 1502 shown"
    assert tab.locator("#r0-tree .name:visible").all_inner_texts() == ["the model", "layers", "499", "b"]
    assert not told


@needs_browser
def test_nothing_is_wider_than_a_narrow_window(browser, page):
    tab, _ = opened(browser, page)
    tab.set_viewport_size({"width": 360, "height": 700})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
