"""What a notebook shows, in a browser: it takes the colors of its cell, runs and loads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from echelon.page.documents.run import run_page
from echelon.page.drawn.document import drawing, static_html
from echelon.page.drawn.marks import svg_file
from tests.page.browser.conftest import Opener
from tests.page.browser.documents import documents
from tests.page.documents.test_run_bad_files import huge_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.timeout(120)
NAMES = ("plan", "run", "proof", "rehearsal", "hostile")
CELLS = {"light": ("rgb(255, 255, 255)", "rgb(20, 20, 20)"), "dark": ("#111", "rgb(238, 238, 238)")}


def test_a_cell_has_the_colors_of_its_notebook(browser: Browser) -> None:
    context = browser.new_context(viewport={"width": 900, "height": 900}, offline=True)
    page = context.new_page()
    problems, requests = list[str](), list[str]()
    page.on("console", lambda one: problems.append(one.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda one: requests.append(one.url))
    for paper, ink in CELLS.values():
        cells = "".join(static_html(documents()[name]) for name in NAMES)
        page.set_content(f'<body style="background: {paper}; color: {ink}">{cells}</body>')
        colors = "[...document.querySelectorAll('svg text, td, summary, p')].map"
        colors += "((one) => getComputedStyle(one).color)"
        assert set(page.evaluate(colors)) == {ink}
        fills = (
            "[...document.querySelectorAll('svg text')].map((one) => getComputedStyle(one).fill)"
        )
        found = page.evaluate(fills)
        # Words on a fill are dark or white; all others are those of the cell.
        assert set(found) <= {ink, "rgb(16, 19, 26)", "rgb(255, 255, 255)", "rgb(209, 67, 43)"}
        assert ink in found
        assert page.evaluate("document.documentElement.scrollWidth") <= 900
        assert page.locator("img, script, iframe, style").count() == 0
    assert problems == []
    assert [one for one in requests if not one.startswith(("about:", "data:"))] == []
    context.close()


def test_an_svg_follows_the_colors_of_the_system(browser: Browser, tmp_path: Path) -> None:
    (memory,) = (part for part in documents()["plan"].sections if part.id == "memory")
    found = drawing(memory)
    assert found is not None
    path = tmp_path / "memory.svg"
    path.write_text(svg_file(found), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    fill = "getComputedStyle(document.querySelector('.paper')).fill"
    page.emulate_media(color_scheme="light")
    assert page.evaluate(fill) == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(fill) == "rgb(20, 23, 28)"
    page.close()


@pytest.mark.slow
def test_a_page_of_ten_thousand_steps_of_64_ranks_opens(opened: Opener, tmp_path: Path) -> None:
    document = run_page(huge_run(tmp_path / "runs", count=10_000, ranks=64))
    found = opened(document)
    assert found.problems == []
    assert found.page.inner_text("#verdict") == document.verdict
    assert found.page.locator("#loss path.series").count() == 2
    assert found.page.locator("#schedule canvas").count() == 2
