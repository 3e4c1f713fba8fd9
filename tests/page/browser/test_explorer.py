"""The explorer in a real browser: its controls are moved, and its numbers are those of Python."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from echelon.config.load import load_job
from echelon.core.units import binary_bytes
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.page.explorer.controls import Controls
from tests.page.browser.conftest import WIDTHS, Opener
from tests.page.browser.explorer_pages import document, link, move, numbers, record, settled, start
from tests.page.explorer.random_controls import Settings, legal_settings, tables
from web.formulas.inputs import inputs_of_controls, predict

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.timeout(600)


def is_shown(page: Page, settings: Settings) -> None:
    wanted, shown = predict(tables(), *settings), numbers(page)
    assert shown["step"] == pytest.approx(float(wanted.step_s), rel=1e-9)
    assert shown["memory of the fullest rank"] == pytest.approx(float(wanted.bytes_held), abs=0.01)
    assert shown["tokens/s of a device"] == pytest.approx(
        float(wanted.tokens_per_s_per_device), rel=1e-9
    )
    assert shown["MFU (full attention)"] == pytest.approx(float(wanted.mfu), rel=1e-9)
    assert shown["ranks"] == settings[0].ranks
    verdict = page.inner_text("#verdict")
    fits = float(wanted.bytes_held) <= settings[2]["memory_bytes"]
    assert verdict.startswith("The plan fits" if fits else "The plan does not fit")
    assert binary_bytes(float(wanted.bytes_held)) in verdict


def test_numbers_follow_the_controls_and_are_those_of_python(opened: Opener) -> None:
    found = opened(document())
    is_shown(found.page, start())
    for settings in legal_settings(21, 12):
        move(found.page, record(settings))
        is_shown(found.page, settings)
    assert found.problems == []
    assert len(found.requests) == 1


@pytest.mark.slow
def test_a_link_holds_the_whole_state(opened: Opener) -> None:
    page = opened(document()).page
    # The page starts with sequence parallelism, which one tensor rank locks.
    settings = next(one for one in legal_settings(22, 20) if one[0].tp > 1)
    move(page, record(settings))
    hash_of_page = page.evaluate("location.hash")
    assert hash_of_page == link(settings)
    other = opened(document()).page
    other.evaluate(f"location.hash = {hash_of_page!r}")
    other.wait_for_function(
        "(text) => document.getElementById('verdict').textContent === text",
        arg=page.inner_text("#verdict"),
    )
    is_shown(other, settings)
    assert other.locator("#control-model").input_value() == settings[1]["name"]


def test_the_run_file_makes_the_plan_that_is_shown(opened: Opener, tmp_path: Path) -> None:
    page = opened(document()).page
    settings = legal_settings(23, 1)[0]
    move(page, record(settings))
    text = page.locator("textarea").input_value()
    assert tomllib.loads(text)["mesh"]["pp"] == settings[0].pp
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    plan = load_job(path).plan
    assert cost_inputs_from_plan(plan) == inputs_of_controls(tables(), *settings)
    page.get_by_role("button", name="Copy run.toml").click()
    page.wait_for_selector("#run [role=status]:not(:empty)")


def test_what_breaks_a_rule_is_said_with_its_arithmetic(opened: Opener) -> None:
    page = opened(document()).page
    page.locator("#control-tp").fill("16")
    assert page.inner_text("#verdict").startswith("These settings make no plan")
    rows = page.locator(".broken li").all_inner_texts()
    told = "tp-divides-kv-heads: mesh.tp = 16, but llama3-8b has kv_heads = 8 (8 % 16 = 8)"
    assert any(row.startswith(told) for row in rows)
    assert not page.locator("main").is_visible()
    assert page.locator("textarea").input_value() == ""
    page.locator("#control-tp").fill("1.5")
    assert "whole number from 1" in page.inner_text(".broken")
    assert page.locator("#control-tp").get_attribute("aria-invalid") == "true"
    page.locator("#control-tp").fill(str(start()[0].tp))
    is_shown(page, start())
    assert not page.locator(".broken").is_visible()


def test_terms_and_bars_are_those_of_the_formulas(opened: Opener) -> None:
    page = opened(document()).page
    settled(page)
    wanted = predict(tables(), *start())
    shown = [name for name, held in wanted.bytes.items() if held > 0]
    assert page.locator("#memory .legend li").all_inner_texts() == shown
    for details in page.locator("details").all():
        details.evaluate("(one) => { one.open = true; }")
    rows = page.locator("#memory tbody tr")
    assert rows.count() == len(wanted.bytes) + 1
    assert binary_bytes(float(wanted.bytes_held)) in rows.last.inner_text()
    widths = page.evaluate(
        "[...document.querySelectorAll('#memory .part')].map((e) => parseFloat(e.style.width))"
    )
    most = max(start()[2]["memory_bytes"], float(wanted.bytes_held))
    held = [100 * float(wanted.bytes[name]) / most for name in shown]
    assert widths == pytest.approx(held, rel=1e-3)


@pytest.mark.quick("360")
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_as_wide_as_its_window(width: int, opened: Opener) -> None:
    page = opened(document(), width=width).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_has_no_serious_fault_of_access(scheme: str, opened: Opener) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core")
    page = opened(document(), color_scheme=scheme).page
    for tp in (None, "16"):
        if tp:
            page.locator("#control-tp").fill(tp)
        settled(page)
        found = axe.Axe().run(page).response["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        assert [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in serious] == []


@pytest.mark.slow
def test_the_keyboard_reaches_every_control(opened: Opener) -> None:
    page = opened(document()).page
    settled(page)
    controls = "a, button, input:enabled, select:enabled, textarea, summary"
    wanted = page.locator(controls).count()
    for _ in range(3 * wanted):
        page.keyboard.press("Tab")
        page.evaluate("document.activeElement.dataset.seen = 1")
    missed = f"[...document.querySelectorAll('{controls}')].filter((e) => !e.dataset.seen).length"
    assert page.evaluate(missed) == 0


def test_every_control_is_one_of_the_record() -> None:
    assert set(record(start())) == {"model", "cluster", *Controls.__slots__}
