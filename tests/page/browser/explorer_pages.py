"""The explorer as tests open it: its document, its controls moved, and its numbers read back."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from echelon.page.explorer.controls import PLAIN
from echelon.page.explorer.document import ExplorerDocument, start_controls
from echelon.page.lessons.catalog import lesson_book
from tests.page.explorer.random_controls import Settings, tables

if TYPE_CHECKING:
    from playwright.sync_api import Page

LOCKED = ("zero", "recompute", "every", "tp", "cp", "ep", "context", "reshard", "sequence_parallel")
"""Controls that lock others, each before those that lock it: they are moved before all others."""


def record(settings: Settings) -> dict[str, object]:
    """Return settings as the page has them."""
    controls, model, cluster = settings
    return {"model": model["name"], "cluster": cluster["name"], **asdict(controls)}


@cache
def start() -> Settings:
    """Return where the page starts."""
    model = next(one for one in tables()["models"] if one["name"] == "llama3-8b")
    cluster = tables()["clusters"][1]
    return start_controls(tables(), model, cluster), model, cluster


def effective(settings: Settings) -> Settings:
    """Return settings with what has no effect as it is where nobody says anything."""
    controls, model, cluster = settings
    dense = model["shape"]["experts"] is None
    alone = ("dispatch", "chunks") if dense or controls.ep == 1 else ()
    whole = controls.recompute == "full" and controls.every == 1
    kind = tables()["context_kinds"][controls.context]["exchange"]
    locked = {
        *alone,
        *(("ep", "expert_tp") if dense else ()),
        *(("sequence_parallel",) if controls.tp == 1 else ()),
        *(("tp_overlap",) if controls.tp == 1 or not controls.sequence_parallel else ()),
        *(("reshard", "secondary", "gather", "parameter_offload") if controls.zero < 3 else ()),
        *(("secondary",) if controls.reshard == "never" else ()),
        *(("reduce", "optimizer_offload") if controls.zero < 1 else ()),
        *(("every",) if controls.recompute != "full" else ()),
        *(("operators",) if controls.recompute == "none" or whole else ()),
        *(("context",) if controls.cp == 1 else ()),
        *(("ulysses",) if controls.cp == 1 or kind != "inner" else ()),
    }
    plain: dict[str, Any] = {name: PLAIN[name] for name in locked}
    return replace(controls, **plain), model, cluster


def document() -> ExplorerDocument:
    """Return what the page is given."""
    return ExplorerDocument(
        title="Explorer",
        start=record(start()),
        tables=tables(),
        book=lesson_book(),
        made_by="Echelon",
    )


def text(value: object) -> str:
    """Return a value as the page writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def link(settings: Settings) -> str:
    """Return the part of an address that holds settings."""
    return f"#{urlencode({name: text(value) for name, value in record(settings).items()})}"


def move(page: Page, wanted: dict[str, object]) -> None:
    """Give every control its value, as somebody who uses the page does."""
    first = ["model", "cluster", *LOCKED]
    order = sorted(wanted, key=lambda name: first.index(name) if name in first else len(first))
    there = page.locator("form.explorer [name]").evaluate_all(
        "(all) => Object.fromEntries(all.map((e) => "
        "[e.name, e.type === 'checkbox' ? String(e.checked) : e.value]))"
    )
    for name in (name for name in order if there[name] != text(wanted[name])):
        control, value = page.locator(f"#control-{name}"), wanted[name]
        kind = control.evaluate("(e) => e.disabled ? '' : e.tagName === 'SELECT' ? 'many' : e.type")
        if kind == "checkbox":
            control.set_checked(bool(value))
        elif kind == "many":
            control.select_option(str(value))
        elif kind:
            control.fill(str(value))


def goto(page: Page, settings: Settings) -> None:
    """Move the page by its address, and wait until all has followed."""
    page.evaluate(
        """(text) => new Promise((done) => {
          if (location.hash === text) return done();
          addEventListener("hashchange", () => done(), { once: true });
          location.hash = text;
        })""",
        link(settings),
    )
    settled(page)


def settled(page: Page) -> None:
    """Wait until what comes after the numbers is there, too."""
    page.wait_for_selector("#page:not(:has([aria-busy]))", state="attached")


def numbers(page: Page) -> dict[str, float]:
    """Return the facts under the verdict."""
    rows = page.locator("dl.facts > div")
    return {
        rows.nth(place).locator("dt").inner_text(): float(
            rows.nth(place).locator("strong").get_attribute("data-number") or "nan"
        )
        for place in range(rows.count())
    }
