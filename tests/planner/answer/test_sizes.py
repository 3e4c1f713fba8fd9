"""What there is of a model on four clusters: as text, JSON, HTML and a table, and each whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.api.given_plan import plan_from_given
from echelon.page.notebook import sizes_html
from echelon.planner.answer.answer import PlanAnswer, SizesAnswer, sizes_text
from echelon.planner.recommend.recommend import four_sizes, recommend
from echelon.planner.search.request import SearchRequest, make_request
from tests.page.drawn.test_document_static import Reader

SMALL = ("model.layers=4", "batch.global_sequences=16")


def request_on(cluster: str) -> SearchRequest:
    """Return the request of a small model on a cluster."""
    return make_request("llama3-8b", cluster=cluster, settings=SMALL)


@pytest.fixture(scope="module", name="sizes")
def _sizes() -> SizesAnswer:
    return SizesAnswer(found=tuple(four_sizes(request_on)))


@pytest.mark.slow
def test_each_size_is_the_whole_answer_of_its_cluster(sizes: SizesAnswer) -> None:
    assert [*sizes] == ["1xh100", "2xh100", "4xh100", "8xh100"]
    assert len(sizes) == 4
    one = sizes["4xh100"]
    assert isinstance(one, PlanAnswer)
    # What the table shows of a cluster is what is recommended on it, not the fastest of a search.
    alone = recommend(request_on("4xh100"))
    assert one.recommended.ranked.candidate == alone.first.ranked.candidate  # type: ignore[union-attr]
    with pytest.raises(KeyError, match=r"8xa100.*is none of 1xh100, 2xh100"):
        sizes["8xa100"]


def test_it_is_no_plan_and_says_which_are(sizes: SizesAnswer) -> None:
    with pytest.raises(TypeError, match=r"has none: take one of its answers.*8xh100"):
        plan_from_given(sizes)  # type: ignore[arg-type]
    assert plan_from_given(sizes["8xh100"]).mesh.world_size == 8


@pytest.mark.parametrize("columns", [60, 80, 120, 160])
def test_no_line_is_wider_than_the_page(sizes: SizesAnswer, columns: int) -> None:
    page = sizes_text(sizes.found, "", "--cluster {name}", columns=columns)
    assert max(map(len, page.splitlines())) <= columns
    assert "--cluster 8xh100" in " ".join(page.split())


def notebook(sizes: SizesAnswer) -> str:
    shown = sizes_html(sizes)
    assert sizes._repr_html_() == shown
    return shown


def test_its_forms_say_the_same(sizes: SizesAnswer) -> None:
    assert repr(sizes) == "<SizesAnswer llama3-8b-changed on 1xh100, 2xh100, 4xh100, 8xh100>"
    assert "this machine has no GPU" in " ".join(str(sizes).split())
    steps = [f"{answer.step_s.value:.4g}" for answer in sizes.answers.values()]
    shown = Reader(notebook(sizes)).cells
    for step in steps:
        assert step in str(sizes)
        assert step in shown
    told = sizes.to_json()["sizes"]
    assert [one["cluster"] for one in told] == [*sizes]
    assert [f"{one['plans'][0]['step_s']:.4g}" for one in told] == steps


def test_gpus_that_nobody_knows_are_named(sizes: SizesAnswer) -> None:
    page = " ".join(str(replace(sizes, unknown_gpus="2 x NVIDIA <New>")).split())
    assert "2 x NVIDIA <New> of this machine is not in the catalogue" in page
    html = notebook(replace(sizes, unknown_gpus="2 x NVIDIA <New>"))
    assert "2 x NVIDIA &lt;New&gt;" in html


def test_a_frame_has_a_row_for_each_cluster(sizes: SizesAnswer) -> None:
    pytest.importorskip("pandas")
    frame = sizes.to_frame()
    assert [*frame["cluster"]] == [*sizes]
    assert frame["step_s"].is_monotonic_decreasing
