"""The pipeline of a Megatron-LM command: virtual stages, and layers of each stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.interop.megatron.read import stages_of_layout
from tests.interop.imports import Imports, rows_of
from tests.interop.megatron.commands import SMALL

TWO = "--pipeline-model-parallel-size 2 --global-batch-size 16"


@pytest.fixture
def megatron(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "megatron")


def command(more: str, layers: int = 4) -> str:
    return f"{' '.join(SMALL.split())} {TWO} {more}".replace("layers 4", f"layers {layers}", 1)


@pytest.mark.parametrize(
    "flag",
    ["--num-layers-per-virtual-pipeline-stage 1", "--num-virtual-stages-per-pipeline-rank 2"],
)
def test_virtual_stages_are_interleaved(megatron: Imports, flag: str) -> None:
    found = megatron(command(f"{flag} --microbatch-group-size-per-virtual-pipeline-stage 2"))
    pipeline = found.job.plan.layout.pipeline
    assert (pipeline.schedule, pipeline.virtual_stages) == ("interleaved-1f1b", 2)
    assert pipeline.stages == ((0,), (1,), (2,), (3,))
    settings = {row.setting for row in rows_of(found, flag.partition(" ")[0])}
    assert settings == {"pipeline.schedule", "pipeline.virtual_stages"}
    group = f"{flag} --microbatch-group-size-per-virtual-pipeline-stage 4"
    assert megatron.refused(command(group)) == [
        ("import-not-honoured", "--microbatch-group-size-per-virtual-pipeline-stage")
    ]


def test_one_virtual_stage_is_none(megatron: Imports) -> None:
    plan = megatron(command("--num-layers-per-virtual-pipeline-stage 2")).job.plan
    assert (plan.layout.pipeline.schedule, plan.layout.pipeline.virtual_stages) == ("1f1b", 1)
    more = "--num-layers-per-virtual-pipeline-stage 3"
    assert megatron.refused(command(more)) == [("import-not-honoured", more.partition(" ")[0])]


def test_stages_are_even_as_they_are_there(megatron: Imports) -> None:
    # A head of 8 blocks' worth: balanced by time it would get fewer of them.
    heavy = command("").replace("--vocab-size 300", "--vocab-size 6000")
    job = megatron(heavy).job
    assert job.plan.layout.pipeline.stages == ((0, 1), (2, 3))
    assert "even split" in job.source_of("pipeline.stages")
    balanced = megatron(heavy, sets=["pipeline.stages=auto"]).job.plan
    assert len(balanced.layout.pipeline.stages[1]) < 2


@pytest.mark.parametrize(
    ("layers", "ends", "counts"),
    [
        (6, ("embedding", "loss"), (3, 3)),
        (5, ("loss",), (3, 2)),
        (5, ("embedding",), (2, 3)),
    ],
)
def test_ends_that_count_as_layers_make_lists(
    megatron: Imports, layers: int, ends: tuple[str, ...], counts: tuple[int, ...]
) -> None:
    flags = [f"--account-for-{end}-in-pipeline-split" for end in ends]
    found = megatron(command(" ".join(flags), layers))
    stages = found.job.plan.layout.pipeline.stages
    assert tuple(map(len, stages)) == counts
    assert [row.setting for flag in flags[-1:] for row in rows_of(found, flag)] == [
        "pipeline.stages"
    ]
    refused = megatron.refused(command(" ".join(flags), layers + 1))
    assert refused == [("import-not-honoured", flags[0])]
    both = f"{flags[0]} --decoder-first-pipeline-num-layers 1"
    assert megatron.refused(command(both, layers)) == [("import-not-honoured", flags[0])]


def test_ends_over_virtual_stages_are_to_be_listed(megatron: Imports) -> None:
    more = "--num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 1 "
    refused = megatron.refused(command(more))
    assert refused == [("import-not-honoured", "--decoder-first-pipeline-num-layers")]


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("Et*3|(tt|)*29,m|L", None),
        ("Et*3|(tt|)*2t|L", [3, 2, 2, 1, 0]),
        ("E|t|tL", [0, 1, 1]),
        ("Et*21|t*21|t*20|t*18,L", [21, 21, 20, 18]),
        ("t|tEL", None),
        ("E|x|L", None),
    ],
)
def test_a_layout_of_megatron_counts_the_layers_of_each_stage(
    layout: str, sizes: list[int] | None
) -> None:
    assert stages_of_layout(layout) == sizes


def test_a_layout_lists_the_stages_of_a_run(megatron: Imports) -> None:
    layout = "--pipeline-model-parallel-layout"
    pipeline = megatron(command(f'{layout} "Et*3|tL"')).job.plan.layout.pipeline
    assert (pipeline.stages, pipeline.schedule) == (((0, 1, 2), (3,)), "1f1b")
    pipeline = megatron(command(f'{layout} "Et|t|t|tL"')).job.plan.layout.pipeline
    assert (pipeline.virtual_stages, pipeline.schedule) == (2, "interleaved-1f1b")
    for wrong in ('"Et*2|tL"', '"Et|t*2|tL"', '"t|L"'):
        (problem,) = megatron.problems(command(f"{layout} {wrong}"))
        assert (problem.rule, problem.key) == ("import-not-honoured", "pipeline.stages")
    both = f'{layout} "Et*3|tL" --decoder-first-pipeline-num-layers 3'
    (problem,) = megatron.problems(command(both))
    assert f"{layout} says it already" in problem.message
