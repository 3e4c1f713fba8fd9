"""What tests read of a lesson: tiles by their ids, facts by their names."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.page.lessons.lesson import DiagramFigure, Frame, Tile


def diagrams(frame: Frame) -> Iterator[DiagramFigure]:
    """Yield the diagrams of a frame."""
    yield from (one for one in frame.figures if isinstance(one, DiagramFigure))


def tiles(frame: Frame) -> dict[str, Tile]:
    """Return all tiles of a frame; AssertionError where two have one id."""
    found = [tile for one in diagrams(frame) for place in one.places for tile in place.tiles]
    by_id = {tile.id: tile for tile in found}
    assert len(by_id) == len(found), "an id is there once"
    return by_id


def tiles_of(frame: Frame, label: str, group: str | None = None) -> list[Tile]:
    """Return the tiles of the places of a label, in a group where one is named."""
    return [
        tile
        for one in diagrams(frame)
        for place in one.places
        if place.label == label and group in (None, place.group)
        for tile in place.tiles
    ]


def facts(frame: Frame) -> dict[str, str]:
    """Return the values of a frame's facts, by name."""
    return {one.name: one.value for one in frame.facts}


def numbers(text: str) -> tuple[tuple[int, ...], ...]:
    """Return the matrix that a label writes out."""
    return tuple(tuple(map(int, line.split())) for line in text.splitlines())
