"""A link holds the schedule that is built; one that says nothing is as none."""

from __future__ import annotations

import re
from urllib.parse import parse_qs

import pytest

from tests.page.browser.builder_page import require_said, rows, shown, start
from tests.page.browser.conftest import Opener
from tests.page.browser.test_explorer import document
from web.formulas.schedules import ActionLengths

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_a_link_holds_what_is_built(opened: Opener) -> None:
    page = opened(document()).page
    start(page, "1f1b", 2, 2)
    page.get_by_role("listbox", name="rank 0").get_by_role("option").nth(1).click()
    page.get_by_role("button", name="Set aside").click()
    page.locator("#built-input").fill("0.75")
    page.locator("#built-limit").fill("2")
    page.locator("#control-microbatch").fill("2")
    link = page.evaluate("location.hash")
    assert re.fullmatch(r"[A-Za-z0-9_.=&#-]+", link)
    assert parse_qs(link[1:])["microbatch"] == ["2"]
    other = opened(document()).page
    other.evaluate(f"location.hash = {link!r}")
    other.wait_for_function("() => document.querySelector('#built-limit').value === '2'")
    assert rows(other) == rows(page)
    assert rows(other)[2] == ["F0.1"]
    assert shown(other) == shown(page)
    lengths = ActionLengths(forward_s=1, input_gradient_s=0.75, weight_gradient_s=1, transfer_s=0)
    require_said(other, lengths, 2)
    assert other.locator("#control-microbatch").input_value() == "2"
    other.reload()
    assert rows(other) == rows(page)


WRONG = (
    "x_1_0__1-1-1-0__F0.0-<img src=x onerror=alert(1)>_",
    "1f1b_99_0__1-1-1-0__F0.0_",
    "1f1b_1___1-1-1-0__F0.0_",
    "1f1b_1_0__1-1-1__F0.0_",
    "1f1b",
    "",
)


def test_a_link_that_says_nothing_is_as_none(opened: Opener) -> None:
    found = opened(document())
    wanted = rows(found.page)
    for built in WRONG:
        found.page.evaluate(
            "(text) => { location.hash = new URLSearchParams({ built: text }); }", built
        )
        found.page.wait_for_timeout(50)
        assert rows(found.page) == wanted
        if built == WRONG[0]:
            found.page.reload()
            assert rows(found.page) == wanted
    assert found.problems == []


@pytest.mark.slow
def test_a_link_may_say_what_no_drag_makes(opened: Opener) -> None:
    page = opened(document()).page
    page.evaluate("location.hash = 'built=odd_1_0.5__1-1-1-0__F0.0-F0.0-W7.9_'")
    page.wait_for_function(
        "() => document.querySelector('.tiles .tile:nth-child(3)')?.innerText === 'W7.9'"
    )
    assert require_said(page).problems[0].rule == "schedule-places-stages"
