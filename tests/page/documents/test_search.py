"""The page of a search: the plan to run with its reasons, rivals in order, and what was refused."""

from __future__ import annotations

from dataclasses import replace

from echelon.page.documents.search import search_page
from echelon.page.notebook import answer_html
from echelon.planner.answer.answer import PlanAnswer
from echelon.planner.answer.recommend_text import answer_facts, run_facts
from echelon.planner.recommend.recommend import Recommendation, recommend
from echelon.planner.search.request import make_request
from tests.page.drawn.test_document_static import HARMLESS, Reader
from tests.planner.requests import small


def test_the_page_has_the_answer_of_the_search() -> None:
    found = recommend(make_request("llama3.2-1b", cluster="4xh100"))
    assert isinstance(found, Recommendation)
    page = search_page(found, "echelon plan llama3.2-1b --cluster 4xh100")
    parts = {one.id: one for one in page.sections}
    why = parts["why"]
    assert why.table is not None
    assert why.table.rows == (*run_facts(found.answer.request), *answer_facts(found))
    assert why.commands[0] == "echelon plan llama3.2-1b --cluster 4xh100"
    rivals = parts["rivals"].table
    assert rivals is not None
    seconds = [one.estimate.step_s for one in found.answer.ranked]
    assert [row[5].lstrip("~") for row in rivals.rows] == [f"{one:.4g}" for one in seconds]
    assert all(row[-1].endswith("%") for row in rivals.rows)
    refused = parts["refused"].table
    assert refused is not None
    assert {rule: int(count.replace(",", "")) for rule, count in refused.rows} == dict(
        found.answer.refused
    )
    # The parts of the plan itself follow.
    assert list(parts)[-1] == "notes" or "memory" in parts


def test_a_notebook_shows_the_page_of_an_answer() -> None:
    found = recommend(small(devices=7))
    assert isinstance(found, Recommendation)
    answer = PlanAnswer(found=found)
    shown = answer_html(answer)
    assert answer._repr_html_() == shown
    read = Reader(shown)
    assert read.tags <= HARMLESS
    for word in ("model", "run", "idle", "step", "memory", "why", "preferred", "sum (step)"):
        assert word in read.cells
    assert "The simplest plan within" in " ".join(shown.split())
    assert "ec.prove(answer)" in shown
    name = '<script>alert("1")</script>&'
    request = found.answer.request
    cluster = replace(request.cluster, name=name)
    other = replace(found, answer=replace(found.answer, request=replace(request, cluster=cluster)))
    assert "<script" not in answer_html(PlanAnswer(found=other))
