"""A real browser for the pages: Chromium without a window, every request of which is counted.

It is Debian's package (`apt-get install chromium`), driven by playwright. Where there is none the
tests are skipped with that reason; under `ECHELON_BROWSER=required`, as CI sets it once it has
installed the package, they fail instead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from echelon.page.explorer.document import ExplorerDocument
from echelon.page.html import write_page
from echelon.planner.view.document import PageDocument

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (360, 768, 1440)


@dataclass
class OpenPage:
    """Hold a page that is open, and what it said and asked for meanwhile."""

    page: Page
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def _missing(why: str) -> None:
    if os.environ.get("ECHELON_BROWSER") == "required":
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start the browser once."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        _missing("no Chromium: apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("no playwright: pip install playwright")
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


Opener = Callable[..., OpenPage]


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opener]:
    """Open the page of a document, without a network, at a width and in colors."""
    with opener(browser, tmp_path) as open_it:
        yield open_it


@pytest.fixture(scope="module")
def shared(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opener]:
    """Open the page of a document once for all tests of a file: they leave it as it was."""
    found: dict[int, OpenPage] = {}
    with opener(browser, tmp_path_factory.mktemp("pages")) as open_it:

        def once(document: PageDocument | ExplorerDocument) -> OpenPage:
            if id(document) not in found:
                found[id(document)] = open_it(document)
            return found[id(document)]

        yield once


@contextmanager
def opener(browser: Browser, folder: Path) -> Iterator[Opener]:
    """Give what opens pages, and close them at the end."""
    contexts = []

    def open_it(
        document: PageDocument | ExplorerDocument, *, width: int = 1000, **options: Any
    ) -> OpenPage:
        path = folder / f"page{len(contexts)}.html"
        write_page(document, path)
        context = browser.new_context(
            viewport={"width": width, "height": 900}, offline=True, **options
        )
        contexts.append(context)
        found = OpenPage(page=context.new_page())
        found.page.on("console", lambda one: _console(found, one.type, one.text))
        found.page.on("pageerror", lambda error: found.problems.append(str(error)))
        found.page.on("request", lambda one: found.requests.append(one.url))
        found.page.goto(path.as_uri())
        found.page.wait_for_selector("#verdict")
        # What stands below is made after the first frame.
        found.page.wait_for_function("() => !document.querySelector('.later')")
        return found

    yield open_it
    for context in contexts:
        context.close()


def _console(found: OpenPage, kind: str, text: str) -> None:
    if kind in ("error", "warning"):
        found.problems.append(text)
