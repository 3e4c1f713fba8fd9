"""Buttons of values that work, plans one change away, and guides, beside the same in Python."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from echelon.page.explorer.broken_rules import broken_rules
from tests.page.browser.conftest import Opener
from tests.page.browser.explorer_pages import (
    document,
    effective,
    goto,
    link,
    numbers,
    settled,
    start,
)
from tests.page.explorer.random_controls import Settings, legal_settings, random_settings, tables
from web.formulas.guides import guide_ways
from web.formulas.inputs import predict

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.timeout(600)


def changed(settings: Settings, button: Locator) -> Settings:
    """Return settings after what a button says."""
    controls, model, cluster = settings
    changes = dict(json.loads(button.get_attribute("data-change") or ""))
    if name := changes.pop("cluster", None):
        cluster = next(one for one in tables()["clusters"] if one["name"] == name)
    return effective((replace(controls, **changes), model, cluster))


def rules(settings: Settings) -> Counter[str]:
    return Counter(one.rule for one in broken_rules(*settings))


def offers(page: Page, settings: Settings) -> dict[str, int]:
    """Return how many buttons each broken rule has; all of them mend it, and break nothing."""
    settled(page)
    before, found = rules(settings), dict[str, int]()
    for rule in before:
        buttons = page.locator(f".broken [data-rule='{rule}'] button")
        found[rule] = buttons.count()
        for place in range(found[rule]):
            after = rules(changed(settings, buttons.nth(place)))
            assert after[rule] < before[rule], (rule, buttons.nth(place).inner_text())
            assert after <= before
    return found


@pytest.mark.slow
def test_a_button_sets_the_nearest_value_that_works(opened: Opener) -> None:
    page = opened(document()).page
    page.locator("#control-tp").fill("16")
    bad = (replace(start()[0], tp=16), *start()[1:])
    found = offers(page, bad)
    assert set(found) == {"tp-divides-kv-heads", "fits-cluster"}
    row = page.locator(".broken [data-rule='tp-divides-kv-heads']")
    assert "works here: tp = 8 tp = 4" in row.inner_text()
    row.get_by_role("button", name="tp = 8", exact=True).click()
    assert page.locator("#control-tp").input_value() == "8"
    assert page.evaluate("document.activeElement.id") == "control-tp"
    assert not page.locator(".broken").is_visible()
    after = (replace(start()[0], tp=8), *start()[1:])
    assert page.evaluate("location.hash") == link(after)
    assert numbers(page)["step"] == pytest.approx(float(predict(tables(), *after).step_s))


def test_where_one_value_does_not_do_two_are_offered(opened: Opener) -> None:
    page = opened(document()).page
    # ZeRO 0 needs whole replicas: of the ranks that are shards, no single control makes any.
    for name, value in (("zero", "0"), ("dp_shard", "16"), ("sequences", "16")):
        control = page.locator(f"#control-{name}")
        control.select_option(value) if name == "zero" else control.fill(value)
    settings = (replace(start()[0], zero=0, dp_shard=16, sequences=16), *start()[1:])
    found = offers(page, settings)
    assert found["no-effect"] > 0


@pytest.mark.slow
def test_what_is_wrong_is_told_with_what_works_of_many_settings(opened: Opener) -> None:
    page, random, seen = opened(document()).page, Random(51), Counter[bool]()
    asked = 0
    while asked < 8:
        settings = effective(random_settings(random))
        if not rules(settings):
            continue
        asked += 1
        goto(page, settings)
        rows = page.locator(".broken [data-rule]")
        told = Counter(row.get_attribute("data-rule") for row in rows.all())
        assert told == rules(settings)
        seen.update(many > 0 for many in offers(page, settings).values())
    assert seen[True] > 4 * seen[False]


@pytest.mark.slow
def test_plans_one_change_away_fit_and_are_faster(opened: Opener) -> None:
    page, shown = opened(document()).page, 0
    for settings in [start(), *legal_settings(52, 6)]:
        goto(page, settings)
        now = predict(tables(), *settings)
        memory = settings[2]["memory_bytes"]
        fits = float(now.bytes_held) <= memory
        rows = page.locator("#neighbours tbody tr")
        steps = []
        for place in range(rows.count()):
            row = rows.nth(place)
            near = changed(settings, row.locator("button"))
            assert not rules(near)
            wanted = predict(tables(), *near)
            steps.append(float(row.get_attribute("data-step") or "nan"))
            assert steps[-1] == pytest.approx(float(wanted.step_s), rel=1e-9)
            told = float(row.get_attribute("data-bytes") or "nan")
            assert told == pytest.approx(float(wanted.bytes_held), abs=0.01)
            assert told <= memory
            assert not fits or steps[-1] < float(now.step_s)
            # What is computed, and over how many ranks, stays.
            assert near[0].ranks == settings[0].ranks
            assert near[0].precision == settings[0].precision
        assert steps == sorted(steps)
        shown += len(steps)
    assert shown > 0


def test_bounds_of_a_microbatch_are_those_that_make_a_plan_and_fit(opened: Opener) -> None:
    page = opened(document()).page
    for settings in [start(), *legal_settings(54, 3)]:
        goto(page, settings)
        controls, model, cluster = settings
        share = controls.sequences // (controls.dp_replicate * controls.dp_shard)
        sizes = [size for size in range(1, share + 1) if share % size == 0]
        made = [(size, (replace(controls, microbatch=size), model, cluster)) for size in sizes]
        legal = [(size, one) for size, one in made if not rules(one)]
        fitting = [
            size
            for size, one in legal
            if float(predict(tables(), *one).bytes_held) <= cluster["memory_bytes"]
        ]
        assert page.inner_text("#microbatches") == (
            f"Sequences of a microbatch that make a plan: {', '.join(str(n) for n, _ in legal)}; "
            f"that fit: {', '.join(map(str, fitting)) or 'none'}."
        )


def test_a_neighbour_is_chosen_by_its_button(opened: Opener) -> None:
    page = opened(document()).page
    page.locator("#control-recompute").select_option("full")
    settled(page)
    button = page.locator("#neighbours tbody button").first
    wanted = changed((replace(start()[0], recompute="full"), *start()[1:]), button)
    button.click()
    assert page.evaluate("location.hash") == link(wanted)
    assert numbers(page)["step"] == pytest.approx(float(predict(tables(), *wanted).step_s))


@pytest.mark.slow
def test_guides_are_walked_with_the_numbers_of_the_controls(opened: Opener) -> None:
    page = opened(document()).page
    for settings in [start(), *legal_settings(53, 4)]:
        goto(page, settings)
        wanted = guide_ways(tables(), *settings)
        shown = page.locator(".way").evaluate_all("(all) => all.map((one) => one.id)")
        assert shown == [f"guide-{way.id}" for way in wanted]
        for way in wanted:
            part = page.locator(f"#guide-{way.id}")
            head = part.locator("summary").text_content() or ""
            assert head.startswith(f"{way.strategy} ({way.says}) - {way.source}: ")
            assert head.endswith("; ".join(way.differs) or "agrees")
            steps = [one.text_content() for one in part.locator("li").all()]
            assert steps == [
                f"{'yes' if step.yes else 'no'} {step.question} {step.why}" for step in way.steps
            ]
            assert part.locator(".note").text_content() == way.note
