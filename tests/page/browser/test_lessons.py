"""Every lesson in a real browser: each choice and step shows what Python made, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from echelon.page.html import page_values, write_page
from echelon.page.lessons.catalog import lesson_book
from echelon.page.lessons.lesson import DiagramFigure, Lesson
from echelon.planner.view.document import ScheduleFigure
from tests.page.browser.conftest import WIDTHS, Opener, OpenPage
from tests.page.browser.lesson_reading import READ, address, wanted
from tests.page.browser.test_explorer import document

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.timeout(600)
LESSONS = lesson_book().lessons
BY_ID = {lesson.id: lesson for lesson in LESSONS}
AXE_OF_DEFAULT = ("ring-attention", "decision-tree")
"""Lessons with tiles, arrows, a grid and a tree; that of all others is slow."""

ENDS = """() => [
  document.documentElement.scrollWidth,
  ...[...document.querySelectorAll("canvas, .place, .board")].map((one) =>
    Math.floor(one.getBoundingClientRect().right)),
]"""
"""Where the page ends, and what must not be cut off."""


@pytest.fixture(scope="module")
def walked(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenPage]:
    """Open one page for all lessons, without a network."""
    path = tmp_path_factory.mktemp("lessons") / "page.html"
    write_page(document(), path)
    context = browser.new_context(viewport={"width": 1000, "height": 900}, offline=True)
    found = OpenPage(page=context.new_page())
    found.page.on("pageerror", lambda error: found.problems.append(str(error)))
    found.page.on(
        "console",
        lambda one: found.problems.append(one.text) if one.type in ("error", "warning") else None,
    )
    found.page.on("request", lambda one: found.requests.append(one.url))
    found.page.goto(f"{path.as_uri()}#lessons")
    found.page.wait_for_selector("main.lessons")
    yield found
    context.close()


def go(page: Page, lesson: Lesson, place: int, step: int) -> None:
    """Open a step of a scene by its address; its arrows are drawn when its width is known."""
    page.evaluate("(hash) => { location.hash = hash; }", address(lesson, place, step))
    frame = lesson.scenes[place].frames[step]
    boards = (one for one in frame.figures if isinstance(one, DiagramFigure))
    page.wait_for_function(
        "([id, text, moves]) => document.querySelector(`main[data-lesson='${id}'] .caption`)"
        "?.textContent === text && document.querySelectorAll('.arrows title').length === moves",
        arg=[lesson.id, frame.caption, sum(len(one.moves) for one in boards)],
    )


def test_the_list_has_every_lesson_under_its_topic(walked: OpenPage) -> None:
    page = walked.page
    page.evaluate("location.hash = '#lessons'")
    page.wait_for_selector("main.lessons")
    links = page.locator("main.lessons li a")
    assert links.all_inner_texts() == [lesson.title for lesson in LESSONS]
    topics = list(dict.fromkeys(lesson.topic for lesson in LESSONS))
    assert page.locator("main.lessons h2").all_inner_texts() == topics
    links.nth(len(LESSONS) - 1).click()
    page.wait_for_selector(f"main[data-lesson='{LESSONS[-1].id}']")


def walk(found: OpenPage, lesson: Lesson, places: range) -> None:
    """Look at every step of some scenes."""
    for place in places:
        for step in range(len(lesson.scenes[place].frames)):
            go(found.page, lesson, place, step)
            shown, right = found.page.evaluate(READ), page_values(wanted(lesson, place, step))
            for part, value in right.items():
                assert shown[part] == value, (lesson.id, place, step, part)
    assert found.problems == []
    assert len(found.requests) == 1


@pytest.mark.one_in(3)
@pytest.mark.system("S58", "E20", "F11", "S60")
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda one: one.id)
def test_the_first_choice_shows_what_python_made(lesson: Lesson, walked: OpenPage) -> None:
    walk(walked, lesson, range(1))


@pytest.mark.slow
@pytest.mark.system("S58", "E20", "F11", "S60")
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda one: one.id)
def test_every_choice_shows_what_python_made(lesson: Lesson, walked: OpenPage) -> None:
    walk(walked, lesson, range(len(lesson.scenes)))


@pytest.mark.one_in(12)
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda one: one.id)
def test_controls_lead_to_their_scene(lesson: Lesson, walked: OpenPage) -> None:
    page = walked.page
    go(page, lesson, 0, 0)
    for control in lesson.controls:
        page.select_option(f"#lesson-{control.name}", control.values[-1])
    last = len(lesson.scenes) - 1
    assert page.evaluate(READ) == wanted(lesson, last, 0)
    frames = len(lesson.scenes[last].frames)
    for step in range(1, frames):
        page.get_by_role("button", name="Next step").click()
        assert page.inner_text(".caption") == lesson.scenes[last].frames[step].caption
    if frames > 1:
        page.get_by_role("button", name="Previous step").click()
        assert page.evaluate("location.hash") == address(lesson, last, frames - 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "width", [WIDTHS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in WIDTHS[1:])]
)
def test_no_lesson_is_wider_than_its_window(width: int, walked: OpenPage) -> None:
    page = walked.page
    page.set_viewport_size({"width": width, "height": 900})
    wide: list[tuple[str, int, int]] = []
    for lesson in LESSONS:
        last = len(lesson.scenes) - 1
        for step in range(len(lesson.scenes[last].frames)):
            go(page, lesson, last, step)
            page.evaluate("document.querySelectorAll('details').forEach((e) => (e.open = true))")
            page.evaluate("new Promise(requestAnimationFrame)")
            ends = page.evaluate(ENDS)
            if max(ends) > width:
                wide.append((lesson.id, step, max(ends)))
    page.set_viewport_size({"width": 1000, "height": 900})
    assert wide == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in AXE_OF_DEFAULT else pytest.mark.slow)
        for name in BY_ID
    ],
)
def test_a_lesson_has_no_serious_fault_of_access(name: str, walked: OpenPage) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core")
    page, lesson = walked.page, BY_ID[name]
    frames = lesson.scenes[0].frames
    page.emulate_media(reduced_motion="reduce")
    go(page, lesson, 0, len(frames) // 2)
    page.evaluate("document.querySelectorAll('details').forEach((e) => (e.open = true))")
    faults: list[tuple[str, str, list[object]]] = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = axe.Axe().run(page).response
        assert len(found["passes"]) > 10
        faults += [
            (scheme, one["id"], [node["target"] for node in one["nodes"]][:3])
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]
    page.emulate_media(color_scheme="light", reduced_motion="no-preference")
    assert faults == []


def test_the_keyboard_reaches_every_control_and_steps(walked: OpenPage) -> None:
    page, lesson = walked.page, BY_ID["pipeline-slots"]
    go(page, lesson, 0, 0)
    controls = ":is(a, button, input, select, canvas[tabindex], summary, pre[tabindex])"
    seen = f"#page nav.tabs {controls}, main.lesson {controls}"
    wanted_count = page.locator(seen).count()
    page.locator("nav.tabs a").first.focus()
    page.evaluate("document.activeElement.dataset.seen = '1'")
    for _ in range(2 * wanted_count):
        page.keyboard.press("Tab")
        page.evaluate("document.activeElement.dataset.seen = '1'")
    missed = f"[...document.querySelectorAll(`{seen}`)].filter((e) => !e.dataset.seen).length"
    assert page.evaluate(missed) == 0
    page.locator("main.lesson input[type=range]").focus()
    for step in range(1, len(lesson.scenes[0].frames)):
        page.keyboard.press("ArrowRight")
        assert page.inner_text(".caption") == lesson.scenes[0].frames[step].caption
    page.keyboard.press("Home")
    assert page.inner_text(".caption") == lesson.scenes[0].frames[0].caption


def test_the_keyboard_reads_every_action_of_a_chart_in_slots(walked: OpenPage) -> None:
    page, lesson = walked.page, BY_ID["gpipe-and-1f1b"]
    go(page, lesson, 0, 0)
    (figure,) = lesson.scenes[0].frames[0].figures
    assert isinstance(figure, ScheduleFigure)
    chart = figure.charts[0]
    page.locator("main.lesson canvas").focus()
    page.keyboard.press("Home")
    lane = chart.lanes[0]
    for number in range(len(lane.kinds)):
        start = lane.starts[number]
        slots = f"{start:g} slot" + ("s" if start != 1 else "")
        assert page.inner_text("main.lesson .said") == (
            f"{chart.name}, {lane.label}: {figure.kinds[lane.kinds[number]]} of microbatch "
            f"{lane.microbatches[number]} on stage {lane.stages[number]}, from {slots} for 1 slot."
            f" Idle: {lane.idle_text}."
        )
        page.keyboard.press("ArrowRight")


def test_play_goes_through_all_steps_and_pause_stops(walked: OpenPage) -> None:
    page, lesson = walked.page, BY_ID["ring-attention"]
    frames = lesson.scenes[0].frames
    go(page, lesson, 0, 0)
    page.clock.install()
    play = page.locator("main.lesson .player button").nth(1)
    play.click()
    assert play.inner_text() == "Pause"
    for frame in frames[1:3]:
        page.clock.run_for(1800)
        assert page.inner_text(".caption") == frame.caption
    play.click()
    assert play.inner_text() == "Play"
    page.clock.run_for(10_000)
    assert page.inner_text(".caption") == frames[2].caption
    play.click()
    page.clock.run_for(20_000)
    assert page.inner_text(".caption") == frames[-1].caption
    assert play.inner_text() == "Play"
    page.clock.resume()


@pytest.mark.slow
def test_tiles_glide_unless_the_system_wants_no_motion(opened: Opener) -> None:
    lesson = BY_ID["ring-attention"]
    running = "document.getAnimations().filter((one) => one.effect.target.dataset?.tile).length"
    for motion, moves in (("no-preference", True), ("reduce", False)):
        page = opened(document(), reduced_motion=motion).page
        go(page, lesson, 0, 1)
        page.get_by_role("button", name="Next step").click()
        assert (page.evaluate(running) > 0) is moves


def test_folds_unfold_by_keyboard_and_a_choice_keeps_the_table_open(walked: OpenPage) -> None:
    page, lesson = walked.page, BY_ID["guide-memory"]
    go(page, lesson, 0, 0)
    fold = page.locator("main.lesson details.fold").first
    line = fold.locator("li").first
    assert not line.is_visible()
    fold.locator("summary").focus()
    page.keyboard.press("Enter")
    assert line.is_visible()
    page.keyboard.press("Enter")
    assert not line.is_visible()
    page.locator("main.lesson").get_by_text("The numbers as a table").click()
    page.select_option("#lesson-weights", lesson.controls[0].values[-1])
    assert page.locator("main.lesson .scroll table").is_visible()


def test_a_lesson_is_found_by_its_address_and_the_explorer_is_left_as_it_was(
    opened: Opener,
) -> None:
    page = opened(document()).page
    page.select_option("#control-length", "4096")
    there = page.evaluate("location.hash")
    page.locator("nav.tabs a").nth(1).click()
    page.wait_for_selector("main.lessons")
    page.locator("nav.tabs a").first.click()
    page.wait_for_selector("#verdict", state="visible")
    assert page.evaluate("location.hash") == there
