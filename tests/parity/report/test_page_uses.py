"""The page in a browser, for those who train, who look for a leaf, who have a keyboard only, or do not see it."""

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_helpers import passing, squeezed, trained

import parity
from parity.evidence.result import LevelResult, Report
from parity.report.html import PAGE
from parity.weights.transfer import Entry, Transfer

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: install the package chromium")


@pytest.fixture(scope="module")
def tab() -> Any:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        chromium = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium.new_context(viewport={"width": 1200, "height": 900}).new_page()
        chromium.close()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with a transfer of 1,200 leaves."""
    names = [f"layers.{layer}.{part}.weight" for layer in range(300) for part in ("query", "key", "value", "out")]
    plan = tuple(
        Entry(n, n.replace("weight", "kernel"), "transposed", (2, 3), "float32", "float32", 24, "rule", False) for n in names
    )
    report = Report(
        (LevelResult("weights", "passed", "1200 arrays"),), transfer=Transfer(None, plan), environment=parity.environment()
    )
    return report.save_html(tmp_path_factory.mktemp("many") / "many.html")


def written(report: Report, folder: Path) -> Path:
    return report.save_html(folder / "page.html")


@needs_browser
@pytest.mark.parametrize("alike", [True, False])
def test_a_training_is_drawn_step_by_step_and_its_numbers_are_in_a_table(tab, tmp_path, alike):
    report = trained(alike)
    tab.goto(written(report, tmp_path).as_uri())
    box = tab.locator("[data-training]")
    box.scroll_into_view_if_needed()
    tab.wait_for_function("box => box.querySelectorAll('.chart svg').length >= 3", arg=box.element_handle())
    labels = box.locator(".chart").evaluate_all("charts => charts.map(c => c.getAttribute('aria-label'))")
    assert ("the dotted one the step in which they part" in labels[0]) is not alike
    assert [label.split(",")[0] for label in labels[1:]] == [
        "The loss of the torch model",
        "The error of each step in the dtype of the models",
    ]
    points = "box => [...box.querySelectorAll('.js-plotly-plot')].map(p => p.data.map(d => [d.name, d.x, d.y]))"
    (first, loss, _) = box.evaluate(points)
    drift = report.training.drift
    assert {name: [float(y) if y else 0.0 for y in ys] for name, _, ys in first} == {
        "parameters": [step.values for step in drift],
        "gradients": [step.gradients for step in drift],
        "loss": [abs(step.loss_difference) for step in drift],
    }
    assert loss[0][1:] == [[1, 2, 3], [step.loss for step in drift]]
    tab.get_by_text("every step").click()
    rows = tab.get_by_role("region", name="Drift by step").locator("tbody tr")
    assert rows.count() == 3 and f"{drift[1].loss:.6g}" in rows.nth(1).inner_text()


@needs_browser
def test_the_plan_of_a_transfer_is_searched_by_name(tab, many):
    tab.goto(many.as_uri())
    field = tab.get_by_label("Show leaves whose name contains")
    field.fill("LAYERS.27.OUT")
    shown = tab.locator("#r0-plan tr:not([hidden])")
    assert shown.count() == 1 and "layers.27.out.kernel" in shown.inner_text()
    assert tab.locator("[data-count='r0-plan']").inner_text() == "1 of 1200 shown"
    field.fill("")
    assert tab.locator("#r0-plan tr:not([hidden])").count() == 1200


@needs_browser
def test_a_screen_reader_hears_headings_tables_regions_and_the_name_of_every_control(tab, many):
    tab.goto(many.as_uri())
    levels = tab.evaluate("[...document.querySelectorAll('h1, h2, h3, h4, h5')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    for role, name in (("table", "Levels"), ("region", "Leaves of the transfer"), ("region", "Environment"), ("main", None)):
        assert tab.get_by_role(role, **({"name": name} if name else {})).count() == 1, role
    assert tab.evaluate("document.documentElement.lang") == "en" and tab.title().startswith("agree: ")
    spoken = tab.locator("body").aria_snapshot()
    assert re.search(r'row "weights ok 1200 arrays"', spoken) and 'link "to the result"' in spoken
    for control in tab.locator("input, button, summary").all():
        assert control.evaluate("c => c.labels?.length || c.textContent.trim().length"), control.evaluate("c => c.outerHTML")
    # What counts is said in words, not by colour or a sign alone.
    assert tab.locator("[aria-hidden=true]").evaluate_all("all => all.every(one => !/[a-z]/i.test(one.textContent))")


@needs_browser
def test_the_keyboard_reaches_everything_in_the_order_of_the_page(tab, tmp_path):
    tab.goto(written(trained(False), tmp_path).as_uri())
    place = "(a => [a.tagName, a.getBoundingClientRect().top + scrollY])(document.activeElement)"
    tab.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    seen = []
    for _ in range(60):
        tab.keyboard.press("Tab")
        seen.append(tab.evaluate(place))
        if seen[-1][0] == "BODY":
            break
    reached = [name for name, _ in seen]
    assert {"A", "SUMMARY", "DIV"} <= set(reached)
    tops = [top for name, top in seen[1:] if name != "BODY"]
    assert all(later >= earlier - 40 for earlier, later in itertools.pairwise(tops))
    # Long tables scroll by the keys too.
    assert tab.locator(".wide").evaluate_all("all => all.every(one => one.tabIndex === 0 && one.getAttribute('aria-label'))")


def contrast(one: str, other: str) -> float:
    """As WCAG 2 has it, between two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted(luminance(colour) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def test_every_text_is_readable_in_light_and_in_dark():
    style = (PAGE / "page.css").read_text(encoding="utf-8")
    schemes = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)]
    assert len(schemes) == 2
    for colours in schemes:
        for name in ("ink", "quiet", "good", "bad", "warn"):
            for ground in ("paper", "field"):
                assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)


# ----------------------------------------------------------------------------- notebook


@pytest.mark.parametrize("make", [passing, lambda: trained(False)])
def test_a_notebook_says_what_the_text_says_and_stays_small(make):
    report = make()
    fragment = report._repr_html_()
    shown = squeezed(re.sub(r"<style>.*?</style>|<[^>]+>", " ", fragment, flags=re.DOTALL))
    assert len(fragment) < 20_000 and "<script" not in fragment
    for level in report.levels:
        assert level.summary.split(";")[0] in shown
    for note in report.notes:
        assert squeezed(str(note)) in shown


def test_notebooks_show_traces_diffs_and_plans_in_the_words_of_the_text():
    diff = parity.diff(np.arange(3.0), np.array([0.0, 1.0, 5.0]))
    plan = parity.transfer({"b": __import__("torch").ones(3)}, {"c": __import__("torch").ones(3)}, dry=True)
    for result in (diff, plan):
        shown = squeezed(re.sub(r"<style>.*?</style>|<[^>]+>", " ", result._repr_html_(), flags=re.DOTALL)).replace(
            "&#39;", "'"
        )
        for line in str(result).splitlines():
            said = squeezed(line).strip().removeprefix("- ")
            if not said.startswith("refused, nothing is written"):
                assert said.replace(">", "&gt;") in shown or said in shown, said


def test_a_notebook_shows_a_long_plan_in_part_and_says_so():
    entry = Entry("a", "b", "as is", (2,), "float32", "float32", 8, "rule", False)
    shown = Transfer(None, (entry,) * 1_200)._repr_html_()
    assert shown.count("<tr>") == 101 and "and 1100 more: .plan has them" in shown and len(shown) < 30_000
    assert "1200 arrays, 9,600 bytes" in shown
