"""Groups of ranks and bytes of their messages, as the layout and cost/ have them."""

from __future__ import annotations

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.core.units import decimal_bytes
from echelon.planner.predict.stage_rows import group_equal_rows, sent_by_axis, stage_rows
from echelon.planner.report.sent import group_lines, groups, sent_figure, sent_sections
from echelon.planner.view.document import BarsFigure

SPLIT = ("mesh.pp=2", "mesh.dp_replicate=2", "mesh.tp=2")


def plan_of(*settings: str) -> Plan:
    return load_job("nano", settings).plan


def test_groups_are_those_of_the_mesh() -> None:
    by_axis = groups(plan_of(*SPLIT))
    assert by_axis["tp"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert [*group_lines(plan_of(*SPLIT), columns=80)][-1].startswith("tp  [0 1]  [2 3]")
    assert groups(plan_of()) == {}


def test_bars_have_the_bytes_of_each_place() -> None:
    plan = plan_of(*SPLIT)
    figure = sent_figure(plan).figure
    assert isinstance(figure, BarsFigure)
    for bar, row in zip(figure.rows, stage_rows(plan), strict=True):
        sent = sent_by_axis(row)
        assert bar.label == f"stage {row.pp_rank}"
        assert dict(zip(figure.kinds, bar.values, strict=True)).items() >= sent.items()
        assert bar.total_text == decimal_bytes(sum(sent.values()))


def test_a_rank_alone_has_no_messages() -> None:
    plan = plan_of()
    assert not [*sent_sections(plan, group_equal_rows(stage_rows(plan)))]
