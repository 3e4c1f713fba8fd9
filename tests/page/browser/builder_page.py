"""The place of the page where a schedule is built: what it shows, and how a hand moves in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from echelon.schedule.action import Schedule
from web.formulas.schedules import ActionLengths, ScheduleVerdict, schedule_verdict

if TYPE_CHECKING:
    from playwright.sync_api import Page

EQUAL = ActionLengths(forward_s=1, input_gradient_s=1, weight_gradient_s=1, transfer_s=0)
ROWS = "[...document.querySelectorAll('#build [role=listbox]')].map("
ROWS += "(list) => [...list.children].map((one) => one.textContent))"


def rows(page: Page) -> list[list[str]]:
    """Return the words of each rank's tiles, then of those that are set aside."""
    return page.evaluate(ROWS)


def shown(page: Page) -> Schedule:
    """Return the schedule whose file the page offers; its tiles are its actions."""
    found = Schedule.from_json(page.locator("#built-file").text_content() or "")
    assert [[str(action) for action in row] for row in found.actions] == rows(page)[:-1]
    return found


def require_said(
    page: Page, lengths: ActionLengths = EQUAL, limit: int | None = None
) -> ScheduleVerdict:
    """Hold all that is said of the schedule that is shown to the engine; return what it says."""
    schedule = shown(page)
    wanted = schedule_verdict(schedule, lengths, limit)
    told = page.locator("#built-faults li").all_inner_texts()
    assert len(told) == len(wanted.problems)
    for text, problem in zip(told, wanted.problems, strict=True):
        assert text.startswith(f"{problem.rule}: {problem.message}.")
        assert all(one in text for one in problem.suggestions)
    drawings = page.locator("#built-circle").all_text_contents()
    assert drawings == ([wanted.drawing] if wanted.circle else [])
    assert page.locator(".circle path.wait").count() == len(wanted.circle)
    numbers = [
        float(one.get_attribute("data-number") or "nan")
        for one in page.locator("#built-numbers dd").all()
    ]
    if wanted.simulation is None:
        assert numbers == []
    else:
        timed = wanted.simulation
        expected = [timed.makespan_s, timed.bubble_fraction, timed.bubble_overhead]
        assert numbers == pytest.approx([*expected, max(wanted.in_flight)], rel=1e-12)
    return wanted


def start(page: Page, name: str, ranks: int, microbatches: int, *, empty: bool = False) -> None:
    """Start from a schedule of the engine."""
    page.locator("#built-schedule").select_option(name)
    page.locator("#built-ranks").fill(str(ranks))
    page.locator("#built-microbatches").fill(str(microbatches))
    page.get_by_role("button", name="Start empty" if empty else "Start from it").click()


def tile(page: Page, list_name: str, place: int) -> dict[str, float]:
    """Return where the middle of a tile is."""
    lists = page.get_by_role("listbox", name=list_name, exact=True)
    one = lists.get_by_role("option").nth(place)
    one.scroll_into_view_if_needed()
    box = one.bounding_box()
    assert box is not None
    return {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}


def drag(page: Page, start: dict[str, float], end: dict[str, float], *, drop: bool = True) -> None:
    """Drag by the mouse, in steps as a hand does."""
    page.mouse.move(start["x"], start["y"])
    page.mouse.down()
    page.mouse.move(end["x"], end["y"], steps=6)
    if drop:
        page.mouse.up()
