"""Every page in a real browser: it loads nothing, says nothing, fits, and can be read by all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from echelon.page.serve import served_run
from tests.page.browser.conftest import WIDTHS, Opener
from tests.page.browser.documents import documents
from tests.page.documents.test_run import steps, written

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.timeout(120)
NAMES = ("plan", "run", "proof", "rehearsal", "hostile")


@pytest.mark.parametrize("name", NAMES)
def test_a_page_loads_without_an_error_and_asks_for_nothing(name: str, shared: Opener) -> None:
    document = documents()[name]
    found = shared(document)
    page = found.page
    assert found.problems == []
    assert [url for url in found.requests if not url.startswith(("file:", "data:"))] == []
    assert len(found.requests) == 1
    assert page.inner_text("#verdict") == document.verdict
    assert page.title() == document.title
    assert page.locator("main > section").count() == len(document.sections)
    # Every part is there, also those that hold hostile text, which made no element of its own.
    assert page.locator("img").count() == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_as_wide_as_its_window(name: str, shared: Opener) -> None:
    page = shared(documents()[name]).page
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        # Figures are drawn anew once they know their width: in the next frame.
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # Nothing is cut off: each canvas is inside of its figure.
        ends = (
            "[...document.querySelectorAll('canvas')].map((c) => c.getBoundingClientRect().right)"
        )
        assert all(right <= width for right in page.evaluate(ends))
    page.set_viewport_size({"width": 1000, "height": 900})


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_no_serious_fault_of_access(name: str, shared: Opener) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core")
    page = shared(documents()[name]).page
    for details in page.locator("details").all():
        details.evaluate("(one) => { one.open = true; }")
    # The policy of the page lets no script in but its own: axe-core comes by the debugger.
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = axe.Axe().run(page).response
        assert len(found["passes"]) > 10
        serious = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
        assert [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in serious] == []
    page.emulate_media(color_scheme="light")


def test_colors_follow_the_system_and_print_leaves_controls_out(opened: Opener) -> None:
    document = documents()["plan"]
    paper = "getComputedStyle(document.body).backgroundColor"
    light = opened(document, color_scheme="light").page
    assert light.evaluate(paper) == "rgb(255, 255, 255)"
    assert opened(document, color_scheme="dark").page.evaluate(paper) != "rgb(255, 255, 255)"
    light.emulate_media(media="print")
    assert not light.locator(".controls").first.is_visible()
    assert light.locator("#memory .bar").first.is_visible()


@pytest.mark.slow
def test_the_keyboard_reaches_every_control(opened: Opener) -> None:
    page = opened(documents()["plan"]).page
    wanted = page.locator("a, button, input, select, canvas[tabindex], summary").count()
    reached = set[str]()
    mark = "(() => { const e = document.activeElement; e.dataset.seen ??= Math.random(); return "
    mark += "e === document.body ? '' : e.dataset.seen; })()"
    for _ in range(3 * wanted):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(mark))
    controls = "a, button, input, select, canvas[tabindex], summary"
    missed = f"[...document.querySelectorAll('{controls}')].filter((e) => !e.dataset.seen).length"
    assert page.evaluate(missed) == 0
    assert len(reached - {""}) >= wanted


@pytest.mark.slow
def test_a_served_page_draws_what_is_new(browser: Browser, tmp_path: Path) -> None:
    run = written(tmp_path, steps(2))
    with served_run(run) as link:
        page = browser.new_page()
        page.goto(link)
        page.locator("#verdict", has_text="2 of 2 steps").wait_for()
        page.locator("#loss details").evaluate("(one) => { one.open = true; }")
        (run / "metrics.jsonl").write_text(steps(5))
        page.locator("#verdict", has_text="5 of 5 steps").wait_for()
        assert page.locator("#loss details").evaluate("(one) => one.open")
        page.close()
