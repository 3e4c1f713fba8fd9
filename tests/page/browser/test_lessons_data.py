"""Lessons in a browser, where a walk over all of them is not enough: copies, matrices, arrows."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest

from echelon.page.explorer.document import ExplorerDocument, explorer_page
from tests.page.browser.conftest import WIDTHS, Opener

if TYPE_CHECKING:
    from playwright.sync_api import Page


MATRICES = (
    "#lesson=toy-mlp&tensor=side+by+side&step=1",
    "#lesson=mlp-pair&cut=rows%2C+columns&ranks=4&step=3",
    "#lesson=column-parallel&ranks=4&step=5",
    "#lesson=ddp-flow&step=4",
)


@lru_cache(maxsize=1)
def _document() -> ExplorerDocument:
    return explorer_page()


def _go(page: Page, address: str) -> None:
    page.evaluate("hash => { location.hash = hash }", address)
    name = parse_qs(address.lstrip("#"))["lesson"][0]
    page.wait_for_selector(f'main[data-lesson="{name}"]')


def _first_moves(page: Page) -> dict[str, list[float]]:
    """Return by how much each tile is moved now, as its animation says for its first moment."""
    return page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll('[data-tile]')].flatMap((one) =>
          one.getAnimations().map((running) => {
            const matrix = new DOMMatrix(running.effect.getKeyframes()[0].transform);
            return [one.dataset.tile, [matrix.e, matrix.f]];
          })))"""
    )


def _boxes(page: Page) -> dict[str, dict[str, float]]:
    return page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll('[data-tile]')].map((one) => {
          const box = one.getBoundingClientRect();
          return [one.dataset.tile, {x: box.x, y: box.y, width: box.width, height: box.height}];
        }))"""
    )


@pytest.mark.slow
def test_a_copy_comes_from_its_origin_and_an_arrow_ends_on_its_tiles(opened: Opener) -> None:
    found = opened(_document())
    page = found.page
    _go(page, "#lesson=collectives&collective=all-gather&step=1")
    before = _boxes(page)
    page.get_by_label("Next step").click()
    moves, after = _first_moves(page), _boxes(page)
    # In the first round rank 1 gets the piece of rank 0: it starts where that is.
    start = {axis: before["0.0"][axis] for axis in "xy"}
    scrolled: Any = page.evaluate("[scrollX, scrollY]")
    x, y = moves["1.0"]
    resting = page.evaluate(
        """() => {
          const one = document.querySelector('[data-tile="1.0"]');
          one.getAnimations().forEach((running) => running.finish());
          const box = one.getBoundingClientRect();
          return [box.x, box.y];
        }"""
    )
    assert scrolled == [0, 0]
    assert resting[0] + x == pytest.approx(start["x"], abs=1)
    assert resting[1] + y == pytest.approx(start["y"], abs=1)
    assert "1.0" in after
    assert "0.0" not in moves, "what stays is still"
    _go(page, "#lesson=grid-and-links&order=data+outermost&cluster=16xh100&step=2")
    _assert_arrows_end_on_tiles(page)
    assert found.problems == []


def _assert_arrows_end_on_tiles(page: Page) -> None:
    """Assert that each arrow between tensor ranks begins and ends at the edges of its tiles."""
    page.wait_for_selector(".arrow")
    boxes = _boxes(page)
    ends = page.evaluate(
        """() => {
          const frame = document.querySelector('.board').getBoundingClientRect();
          return [...document.querySelectorAll('.arrow')].map((one) => {
            const numbers = one.getAttribute('d').match(/-?[\\d.]+/g).map(Number);
            const at = numbers.length;
            return [[numbers[0] + frame.x, numbers[1] + frame.y],
                    [numbers[at - 2] + frame.x, numbers[at - 1] + frame.y]];
          });
        }"""
    )
    # Four groups of four tensor ranks, neighbour by neighbour.
    pairs = [(first + place, first + place + 1) for first in range(0, 16, 4) for place in range(3)]
    assert len(ends) == len(pairs)
    for both, ranks in zip(ends, pairs, strict=True):
        for (x, y), rank in zip(both, ranks, strict=True):
            box = boxes[f"rank {rank}"]
            assert box["x"] - 1 <= x <= box["x"] + box["width"] + 1
            assert box["y"] - 1 <= y <= box["y"] + box["height"] + 1


@pytest.mark.slow
def test_numbers_of_a_matrix_are_whole_in_their_tile(opened: Opener) -> None:
    page = opened(_document()).page
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for address in MATRICES:
            _go(page, address)
            cut = page.evaluate(
                """() => [...document.querySelectorAll('.tile')].filter((one) =>
                  one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 1
                ).map((one) => one.dataset.tile)"""
            )
            assert cut == [], (width, address)
            first = page.locator(".tile.matrix").first
            space = first.evaluate("one => getComputedStyle(one).whiteSpace")
            assert space.startswith("pre")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), address
