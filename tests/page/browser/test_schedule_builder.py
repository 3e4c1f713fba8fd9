"""A schedule is built in a real browser: what is said of it is what the engine says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from echelon.config.load import load_job
from echelon.schedule.action import Action
from echelon.schedule.check import check_schedule
from echelon.schedule.deadlock import draw_deadlock, find_deadlock
from echelon.schedule.files import read_schedule_file
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.simulate import Durations, simulate
from tests.page.browser.builder_page import drag, require_said, rows, shown, start, tile
from tests.page.browser.conftest import WIDTHS, Opener
from tests.page.browser.test_explorer import document
from web.formulas.schedules import ActionLengths, schedule_start, schedule_text

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_starts_are_the_schedules_of_the_engine(opened: Opener) -> None:
    found = opened(document())
    assert require_said(found.page).simulation is not None
    for name, ranks, microbatches in (("zb-v", 3, 6), ("dualpipe", 4, 8), ("gpipe", 8, 16)):
        start(found.page, name, ranks, microbatches)
        wanted = schedule_start(name, ranks, 2 if name == "zb-v" else 1, microbatches).schedule
        assert shown(found.page) == wanted
        assert require_said(found.page).problems == []
    start(found.page, "dualpipe", 3, 6)
    assert found.page.inner_text("#built-start-faults").startswith("schedule-even-ranks: ")
    assert shown(found.page).name == "gpipe"
    found.page.locator("#built-ranks").fill("9")
    found.page.get_by_role("button", name="Start from it").click()
    assert "whole numbers" in found.page.inner_text("#built-start-faults")
    assert found.problems == []
    assert len(found.requests) == 1


def test_a_circle_is_drawn_while_a_tile_is_dragged(opened: Opener) -> None:
    found = opened(document())
    page = found.page
    start(page, "1f1b", 2, 2)
    assert rows(page)[:2] == [
        ["F0.0", "F0.1", "BW0.0", "BW0.1"],
        ["F1.0", "BW1.0", "F1.1", "BW1.1"],
    ]
    drag(page, tile(page, "rank 1", 2), tile(page, "rank 1", 1))
    assert rows(page)[1] == ["F1.0", "F1.1", "BW1.0", "BW1.1"]
    assert require_said(page).problems == []
    drag(page, tile(page, "rank 0", 2), tile(page, "rank 0", 1), drop=False)
    # The button of the mouse is still down.
    assert rows(page)[0] == ["F0.0", "BW0.0", "F0.1", "BW0.1"]
    said = require_said(page)
    circle = find_deadlock(shown(page))
    assert len(circle) == len(said.circle) == 2
    assert page.inner_text("#built-verdict").startswith("It deadlocks: 2 ranks wait")
    assert "rank 0 cannot start BW0.0 before BW1.0 on rank 1" in page.inner_text("#built-faults")
    assert page.locator("#built-circle").text_content() == draw_deadlock(shown(page), circle)
    arrows = page.locator(".circle path[data-told]")
    assert [one.get_attribute("data-told") for one in arrows.all()] == [
        "rank 0 BW0.0 waits for BW1.0 on rank 1",
        "BW1.0 stands behind F1.1 on rank 1",
        "rank 1 F1.1 waits for F0.1 on rank 0",
        "F0.1 stands behind BW0.0 on rank 0",
    ]
    require_arrows_join_tiles(page)
    assert page.locator(".tile.stuck").all_inner_texts() == ["BW0.0", "F1.1"]
    assert page.locator(".tile.awaited").all_inner_texts() == ["F0.1", "BW1.0"]
    page.mouse.up()
    page.get_by_role("button", name="Undo").click()
    assert rows(page)[0] == ["F0.0", "F0.1", "BW0.0", "BW0.1"]
    assert require_said(page).problems == []
    page.get_by_role("button", name="Redo").click()
    assert require_said(page).circle != ()
    assert found.problems == []
    assert len(found.requests) == 1


def require_arrows_join_tiles(page: Page) -> None:
    """The ends of the arrow from rank 0 to rank 1 are at the edges of the two tiles."""
    box = "(s) => { const b = document.querySelector(s).getBoundingClientRect();"
    box += " return [b.left, b.top, b.right, b.bottom]; }"
    ends = page.evaluate(
        "() => { const p = document.querySelector('.circle path.wait');"
        " const m = p.getScreenCTM(); const n = p.getTotalLength();"
        " return [0, n].map((at) => p.getPointAtLength(at).matrixTransform(m))"
        ".map((o) => [o.x, o.y]); }"
    )
    for (x, y), css in zip(ends, (".tile.stuck", ".lane:nth-child(2) .awaited"), strict=True):
        left, top, right, bottom = page.evaluate(box, css)
        assert left <= x <= right
        assert top - 5 <= y <= bottom + 5


def test_an_action_moves_by_touch(opened: Opener) -> None:
    found = opened(document(), width=360, has_touch=True, is_mobile=True)
    page = found.page
    start(page, "gpipe", 2, 2)
    here, there = tile(page, "rank 1", 2), tile(page, "rank 1", 1)
    touch = page.context.new_cdp_session(page)
    for kind, points in (
        ("touchStart", [here]),
        ("touchMove", [{**here, "x": here["x"] - 10}]),
        ("touchMove", [there]),
        ("touchEnd", []),
    ):
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    assert rows(page)[1] == ["F1.0", "BW1.0", "F1.1", "BW1.1"]
    assert require_said(page).problems == []
    assert found.problems == []


def test_keys_choose_pick_up_move_and_put_back(opened: Opener) -> None:
    page = opened(document()).page
    start(page, "1f1b", 2, 3)
    before = rows(page)
    assert page.locator("#build [role=option][tabindex='0']").count() == 1
    page.locator("#build [role=option][tabindex='0']").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "End", "Home", "ArrowUp"):
        page.keyboard.press(key)
    focused = "document.activeElement.textContent"
    assert page.evaluate(focused) == "F0.0"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.inner_text("#built-said").startswith("Picked up: F0.1, forward of microbatch 1")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    moved = ["F0.0", "BW0.0", "F0.2", "F0.1", "BW0.1", "BW0.2"]
    assert rows(page)[0] == moved
    assert "place 4 of 6 on rank 0" in page.inner_text("#built-said")
    require_said(page)
    page.keyboard.press("Escape")
    assert rows(page) == before
    assert page.evaluate(focused) == "F0.1"
    for key in ("Enter", "ArrowRight", "ArrowRight", "ArrowDown", " "):
        page.keyboard.press(key)
    assert rows(page)[1][3] == "F0.1"
    wrong = require_said(page)
    assert wrong.problems[0].rule == "schedule-covers-once"
    assert "but stage 0 is on rank 0" in page.inner_text("#built-faults")
    assert "F0.1" in page.locator(".tile.named").all_inner_texts()
    page.keyboard.press("Control+z")
    assert rows(page) == before
    page.keyboard.press("Delete")
    assert len(rows(page)[2]) == 1
    assert require_said(page).problems[0].rule == "schedule-covers-once"
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+Shift+z")
    assert len(rows(page)[2]) == 1


@pytest.mark.slow
def test_buttons_do_what_dragging_does(opened: Opener) -> None:
    page = opened(document()).page
    start(page, "1f1b", 2, 2)
    before = rows(page)
    page.get_by_role("listbox", name="rank 0").get_by_role("option").nth(1).click()
    page.get_by_role("button", name="Move later").click()
    assert rows(page)[0] == ["F0.0", "BW0.0", "F0.1", "BW0.1"]
    page.get_by_role("button", name="Move earlier").click()
    assert rows(page) == before
    page.get_by_role("button", name="To the rank below").click()
    assert rows(page)[1][1] == "F0.1"
    page.get_by_role("button", name="To the rank above").click()
    page.get_by_role("listbox", name="rank 1").get_by_role("option").nth(3).click()
    page.get_by_role("button", name="Split or fuse").click()
    assert rows(page)[1] == ["F1.0", "BW1.0", "F1.1", "B1.1", "W1.1"]
    assert require_said(page).problems == []
    page.get_by_role("button", name="Set aside").click()
    assert rows(page)[2] == ["B1.1"]
    assert "B is missing" in page.inner_text("#built-faults")
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("listbox", name="rank 1").get_by_role("option").nth(4).click()
    page.get_by_role("button", name="Split or fuse").click()
    assert rows(page) == before
    page.get_by_role("listbox", name="rank 1").get_by_role("option").first.click()
    page.get_by_role("button", name="Split or fuse").click()
    assert page.inner_text("#built-said").startswith("F has no parts")


@pytest.mark.slow
def test_from_nothing_to_a_schedule_that_runs(opened: Opener) -> None:
    page = opened(document()).page
    start(page, "naive", 1, 2, empty=True)
    assert rows(page) == [[], ["F0.0", "BW0.0", "F0.1", "BW0.1"]]
    assert require_said(page).problems[0].rule == "schedule-covers-once"
    for place in range(4):
        here = tile(page, "set aside", 0)
        box = page.get_by_role("listbox", name="rank 0").bounding_box()
        assert box is not None
        drag(page, here, {"x": box["x"] + 20 + 50 * place, "y": box["y"] + 15})
    assert rows(page) == [["F0.0", "BW0.0", "F0.1", "BW0.1"], []]
    assert require_said(page).problems == []


@pytest.mark.slow
def test_lengths_and_a_limit_of_memory_are_the_engine_s(opened: Opener) -> None:
    page = opened(document()).page
    start(page, "zb-h1", 4, 6)
    for name, value in (
        ("forward", "1"),
        ("input", "1.5"),
        ("weight", "0.5"),
        ("transfer", "0.25"),
    ):
        page.locator(f"#built-{name}").fill(value)
    lengths = ActionLengths(
        forward_s=1, input_gradient_s=1.5, weight_gradient_s=0.5, transfer_s=0.25
    )
    assert require_said(page, lengths).problems == []
    page.locator("#built-limit").fill("3")
    broken = require_said(page, lengths, 3)
    assert {one.rule for one in broken.problems} == {"schedule-within-memory"}
    assert broken.simulation is not None
    page.locator("#built-forward").fill("soon")
    assert page.locator("#built-forward").get_attribute("aria-invalid") == "true"
    require_said(page, lengths, 3)


def test_the_copied_file_is_read_proved_and_timed_by_the_engine(
    opened: Opener, tmp_path: Path
) -> None:
    page = opened(document()).page
    start(page, "1f1b", 4, 6)
    for row, place in (("rank 0", 3), ("rank 2", 2)):
        drag(page, tile(page, row, place), tile(page, row, place + 1))
    wanted = require_said(page)
    assert wanted.problems == []
    page.get_by_role("button", name="Copy schedule file").click()
    page.wait_for_selector("#built-copy [role=status]:not(:empty)")
    path = tmp_path / "built.json"
    path.write_text(page.locator("#built-file").text_content() or "", encoding="utf-8")
    read = read_schedule_file(path).schedule
    assert schedule_text(read) == path.read_text(encoding="utf-8")
    assert [[str(one) for one in row] for row in read.actions] == rows(page)[:-1]
    assert read.name == "built-from-1f1b"
    plan = load_job(
        "nano",
        (
            *("mesh.pp=4", "model.layers=8", 'model.name="deep"', "batch.global_sequences=6"),
            *("batch.microbatch_sequences=1", "pipeline.schedule=file", f"pipeline.file={path}"),
        ),
    ).plan
    assert schedule_from_plan(plan).actions == read.actions
    report = check_schedule(read)
    timed = simulate(read, Durations.uniform(4))
    told = page.locator("#built-numbers dd")
    assert float(told.nth(0).get_attribute("data-number") or 0) == timed.makespan_s
    assert int(told.nth(3).inner_text()) == max(report.peak_in_flight_per_rank)
    assert Action.parse(rows(page)[0][3]) == read.actions[0][3]


def at_states(page: Page) -> list[str]:
    """Return links to a schedule that runs, one that deadlocks, and an empty one."""
    start(page, "dualpipe-v", 2, 4)
    runs = page.evaluate("location.hash")
    stuck = "#built=by-hand_2_0.1__1-1-1-0__F0.0-BW0.0-F0.1-BW0.1_F1.0-F1.1-BW1.0-BW1.1_"
    start(page, "gpipe", 4, 16, empty=True)
    return [runs, stuck, page.evaluate("location.hash")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "width", [WIDTHS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in WIDTHS[1:])]
)
def test_the_builder_is_as_wide_as_its_window(width: int, opened: Opener) -> None:
    page = opened(document(), width=width).page
    for link in at_states(page):
        page.evaluate(f"location.hash = {link!r}")
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        require_said(page)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_the_builder_has_no_serious_fault_of_access(scheme: str, opened: Opener) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core")
    page = opened(document(), color_scheme=scheme).page
    for link in at_states(page):
        page.evaluate(f"location.hash = {link!r}")
        page.wait_for_timeout(100)
        # What is computed later is pale until it is there.
        page.wait_for_function("() => !document.querySelector('#page [aria-busy]')")
        found = axe.Axe().run(page).response["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        assert [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in serious] == []


@pytest.mark.slow
def test_a_drag_scrolls_at_an_edge_and_escape_puts_back(opened: Opener) -> None:
    page = opened(document(), width=360).page
    start(page, "gpipe", 2, 8)
    before = rows(page)
    box = page.locator(".tiles").bounding_box()
    assert box is not None
    here = tile(page, "rank 0", 1)
    drag(page, here, {"x": box["x"] + box["width"] - 6, "y": here["y"]}, drop=False)
    page.wait_for_function(
        "() => document.querySelector('#build .lane').textContent.endsWith('F0.1')"
    )
    assert page.evaluate("document.querySelector('.tiles').scrollLeft") > 0
    assert rows(page)[0][-1] == "F0.1"
    assert require_said(page).problems[0].rule == "schedule-keeps-order"
    page.keyboard.press("Escape")
    assert rows(page) == before
    page.mouse.up()
    assert rows(page) == before
    assert require_said(page).problems == []
