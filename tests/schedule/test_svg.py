"""The timeline as a figure: every box where and how long it ran, and nothing that breaks XML."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.event import Event
from echelon.schedule.action import Schedule
from echelon.schedule.build import build_schedule
from echelon.schedule.draw import panels_svg, ticks, timeline_svg
from echelon.schedule.simulate import Durations, simulate
from tests.schedule.examples import mirrored_schedules, schedule_of

NAMESPACE = "{http://www.w3.org/2000/svg}"


def _events(schedule: Schedule, **durations: float) -> tuple[Event, ...]:
    return simulate(schedule, Durations.uniform(schedule.num_stages, **durations)).events


def _boxes(text: str) -> list[ElementTree.Element]:
    """Return the boxes of actions in a figure; those of the key have no tip."""
    figure = ElementTree.fromstring(text)
    return [
        rect
        for rect in figure.iter(f"{NAMESPACE}rect")
        if rect.get("class", "").startswith("box") and len(rect)
    ]


def _texts(text: str, name: str) -> list[str]:
    figure = ElementTree.fromstring(text)
    found = (node for node in figure.iter(f"{NAMESPACE}text") if node.get("class") == name)
    return [node.text or "" for node in found]


@pytest.fixture(scope="module")
def one() -> str:
    schedule = build_schedule("1f1b", num_stages=4, num_ranks=4, num_microbatches=8)
    return timeline_svg(_events(schedule), title="1f1b <4> & 8", unit="slots")


def test_a_figure_has_a_title_a_row_per_rank_and_a_box_per_action(one: str) -> None:
    assert _texts(one, "title") == ["1f1b <4> & 8"]
    assert _texts(one, "rank") == [f"rank {rank}" for rank in range(4)]
    assert len(_boxes(one)) == 2 * 4 * 8
    assert sorted(map(int, _texts(one, "label"))) == sorted([*range(8)] * 8)
    assert _texts(one, "key") == ["F: forward", "BW: backward"]
    ticks = _texts(one, "tick")
    assert ticks == ["0", "5", "10", "15", "20", "25", "30 slots"]


def test_a_box_is_as_long_as_its_action_and_stands_where_it_ran(one: str) -> None:
    forward, backward = _boxes(one)[0], _boxes(one)[4]
    tips = [box[0].text for box in (forward, backward)]
    assert tips == ["F0.0 on rank 0: 0 to 1", "BW0.0 on rank 0: 10 to 12"]
    slot = float(forward.get("width", 0))
    assert float(backward.get("width", 0)) == pytest.approx(2 * slot, abs=0.02)
    ahead = float(backward.get("x", 0)) - float(forward.get("x", 0))
    assert ahead == pytest.approx(10 * slot, abs=0.1)


@given(mirrored_schedules)
def test_any_schedule_is_drawn_whole_and_within_its_page(schedule: Schedule) -> None:
    events = _events(schedule, transfer_s=0.25)
    text = timeline_svg(events, title=schedule.name, width=700)
    assert text == timeline_svg(tuple(reversed(events)), title=schedule.name, width=700)
    boxes = _boxes(text)
    assert len(boxes) == sum(map(len, schedule.actions))
    bottom = float(ElementTree.fromstring(text).get("height", 0))
    rows: dict[str, list[tuple[float, float]]] = {}
    for box in boxes:
        x, y, width = (float(box.get(name, -1)) for name in ("x", "y", "width"))
        assert x > 0
        assert x + width <= 700
        assert 0 < y < bottom
        rows.setdefault(str(y), []).append((x, x + width))
    for row in rows.values():
        spans = sorted(row)
        assert all(end <= start + 0.02 for (_, end), (start, _) in pairwise(spans))


def test_the_stages_of_a_rank_have_shades_of_the_color_of_their_kind() -> None:
    schedule = schedule_of("F0.0 F1.0 B1.0 B0.0 W1.0 W0.0", num_microbatches=1, stage_ranks=(0, 0))
    text = timeline_svg(_events(schedule), title="two stages")
    classes = [box.get("class") for box in _boxes(text)]
    assert classes == ["box F0", "box F1", "box B1", "box B0", "box W1", "box W0"]
    fills = re.findall(r"^\.[FBW]+\d \{ fill: (#[0-9a-f]{6}); \}$", text, re.MULTILINE)
    assert len(fills) == len(set(fills)) == 8
    assert _texts(text, "key")[-1] == "stages of a rank, lowest first"


def test_panels_share_one_time_axis_and_each_starts_at_its_own_first_event() -> None:
    schedule = build_schedule("gpipe", num_stages=2, num_ranks=2, num_microbatches=2)
    planned = _events(schedule)
    late = [
        Event(kind=e.kind, name=e.name, stage=e.stage, microbatch=e.microbatch, rank=e.rank,
              start=100 + 2 * e.start, end=100 + 2 * e.end)
        for e in planned
        if e.kind != "send"
    ]  # fmt: skip
    text = panels_svg([("planned", planned), ("measured", late)])
    assert _texts(text, "title") == ["planned", "measured"]
    boxes = _boxes(text)
    fast, slow = boxes[0], boxes[8]
    assert slow.get("x") == fast.get("x")
    twice = 2 * float(fast.get("width", 0))
    assert float(slow.get("width", 0)) == pytest.approx(twice, abs=0.02)


def test_messages_that_take_time_are_thin_lines_and_named_in_the_key() -> None:
    schedule = build_schedule("gpipe", num_stages=2, num_ranks=2, num_microbatches=1)
    events = [
        *_events(schedule, transfer_s=1),
        Event(kind="all_reduce", name="bucket 0", axis="dp_shard", start=5.0, end=8.0),
        Event(kind="update", name="update", start=8.0, end=9.0),
    ]
    text = timeline_svg(events, title="talk")
    figure = ElementTree.fromstring(text)
    tips = [rect[0].text for rect in figure.iter(f"{NAMESPACE}rect") if len(rect)]
    assert "activation 0 stage 0 -> 1 on rank 0: 1 to 2" in tips
    assert "bucket 0 on rank 0: 5 to 8" in tips
    assert not any((tip or "").startswith("update") for tip in tips)
    assert _texts(text, "key")[-3:] == ["activation sent", "gradient sent", "collective"]


def test_a_figure_reads_on_a_dark_page_too(one: str) -> None:
    assert "@media (prefers-color-scheme: dark)" in one
    assert "http" not in one.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("events", [[], [Event(kind="F", name="F0.0", stage=0, microbatch=0)]])
def test_nothing_and_no_time_at_all_are_still_a_figure(events: list[Event]) -> None:
    text = timeline_svg(events, title='a\0b "c"')
    assert _texts(text, "title") == ['a b "c"']
    assert len(_boxes(text)) == len(events)


@pytest.mark.parametrize(
    ("span", "unit", "labels", "name"),
    [
        (33.0, "slots", ["0", "5", "10", "15", "20", "25", "30"], "slots"),
        (10.0, "s", [str(n) for n in range(11)], "s"),
        (0.004, "s", ["0", "0.5", "1", "1.5", "2", "2.5", "3", "3.5", "4"], "ms"),
        (0.0, "s", ["0"], "s"),
        (3e-7, "s", ["0", "50", "100", "150", "200", "250", "300"], "ns"),
    ],
)
def test_a_span_has_these_labels(span: float, unit: str, labels: list[str], name: str) -> None:
    scale, found, scaled = ticks(span, unit)
    assert ([f"{tick * scale:.6g}" for tick in found], scaled) == (labels, name)


@given(st.floats(1e-8, 1e8))
def test_ticks_are_few_and_within_the_span(span: float) -> None:
    _, found, _ = ticks(span, "s")
    assert found[0] == 0
    assert 2 <= len(found) <= 14
    assert found[-1] <= span * (1 + 1e-6)
    assert span - found[-1] < found[1] * (1 + 1e-6)
