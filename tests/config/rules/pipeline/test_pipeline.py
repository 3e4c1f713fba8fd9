"""A schedule in a file: whole, with the numbers of the run, refused by its cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.problems import problems_of
from tests.config.schedule_files import DEEP, csv, from_file, rows_of
from tests.config.suggestions import taken


def test_a_file_may_put_a_tied_embedding_on_two_ranks_only(tmp_path: Path) -> None:
    # Microbatch 1 crosses the ranks the other way round.
    placement = (0, 2, 3, 1)
    words: list[list[str]] = [[] for _ in placement]
    for microbatch in (0, 1):
        for kind, stages in (("F", range(4)), ("BW", range(3, -1, -1))):
            for stage in stages:
                rank = placement[stage] if microbatch == 0 else 3 - placement[stage]
                words[rank].append(f"{kind}{stage}.{microbatch}")
    path = csv(tmp_path / "both.csv", [" ".join(row) for row in words])
    run = ["mesh.pp=4", "batch.microbatch_sequences=8"]
    sets = [*from_file(path)[1:], *run]
    found = problems_of("nano", [*sets, "model.tied=true"])
    assert list(found) == ["tied-ends-mirrored"]
    problem = found["tied-ends-mirrored"]
    assert problem.key == "pipeline.file"
    assert problem.set_by.startswith(f"--set pipeline.file={path}")
    assert "ranks 0 and 3" in problem.message
    assert problems_of("nano", taken(problem.suggestions[0], sets)) == {}


@pytest.mark.parametrize(
    ("more", "works"),
    [
        (["mesh.pp=4"], ["mesh.pp = 2"]),
        (
            ["batch.global_sequences=32", "batch.microbatch_sequences=2"],
            ["batch.global_sequences = 16", "batch.microbatch_sequences = 4"],
        ),
        (["pipeline.virtual_stages=2"], ["pipeline.virtual_stages = 1"]),
    ],
)
def test_a_file_must_have_the_numbers_of_the_run(
    tmp_path: Path, more: list[str], works: list[str]
) -> None:
    path = csv(tmp_path / "mine.csv", rows_of("1f1b", 2, 2, 8))
    sets = [text for text in from_file(path) if text.partition("=")[0] != more[0].partition("=")[0]]
    found = problems_of("nano", [*sets, *more])
    assert list(found) == ["schedule-file-fits-run"]
    problem = found["schedule-file-fits-run"]
    assert list(problem.suggestions) == works
    assert problem.key == "pipeline.file"
    for advice in works:
        assert problems_of("nano", taken(advice, [*sets, *more])) == {}


def test_a_file_that_is_wrong_is_refused_by_its_cell(tmp_path: Path) -> None:
    rows = rows_of("1f1b", 2, 2, 8)
    broken = csv(tmp_path / "broken.csv", [rows[0].replace("BW0.3 ", ""), rows[1]])
    found = problems_of("nano", from_file(broken))
    assert list(found) == ["schedule-covers-once"]
    assert "microbatch 3" in found["schedule-covers-once"].message
    whole = csv(tmp_path / "whole.csv", rows)
    over = problems_of("nano", from_file(whole, "pipeline.most_in_flight=1"))
    assert list(over) == ["schedule-within-memory"]
    assert problems_of("nano", from_file(whole, "pipeline.most_in_flight=2")) == {}
    assert list(problems_of("nano", from_file(tmp_path / "none.csv"))) == ["no-such-file"]
    assert list(problems_of("nano", from_file(Path("x"))[:2])) == ["missing-setting"]
    uneven = csv(tmp_path / "uneven.csv", ["F0.0 F2.0 BW2.0 BW0.0", "F1.0 BW1.0"])
    one = problems_of("nano", from_file(uneven, "batch.microbatch_sequences=16"))
    assert list(one) == ["schedule-file-fits-run"]
    assert "3 stages" in one["schedule-file-fits-run"].message


def test_a_search_without_memory_is_refused() -> None:
    sets = [*DEEP, "mesh.pp=2", "pipeline.schedule=auto", "pipeline.virtual_stages=2"]
    found = problems_of("nano", [*sets, "pipeline.most_in_flight=1"])
    (problem,) = found.values()
    assert problem.key == "pipeline.most_in_flight"
    assert "pipeline.most_in_flight=1" in problem.set_by
