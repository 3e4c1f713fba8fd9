"""The page of a search: the plan to run with its reasons, rivals in order, and what was refused."""

from __future__ import annotations

from echelon.page.search import search_page
from echelon.planner.answer.recommend_text import answer_facts
from echelon.planner.recommend.recommend import Recommendation, recommend
from echelon.planner.search.request import make_request


def test_the_page_has_the_answer_of_the_search() -> None:
    found = recommend(make_request("llama3.2-1b", cluster="4xh100"))
    assert isinstance(found, Recommendation)
    page = search_page(found, "echelon plan llama3.2-1b --cluster 4xh100")
    parts = {one.id: one for one in page.sections}
    why = parts["why"]
    assert why.table is not None
    assert why.table.rows == tuple(answer_facts(found))
    assert why.commands[0] == "echelon plan llama3.2-1b --cluster 4xh100"
    rivals = parts["rivals"].table
    assert rivals is not None
    seconds = [one.estimate.step_s for one in found.answer.ranked]
    assert [row[1] for row in rivals.rows] == [f"{one:.4g}" for one in seconds]
    refused = parts["refused"].table
    assert refused is not None
    assert {rule: int(count.replace(",", "")) for rule, count in refused.rows} == dict(
        found.answer.refused
    )
    # The parts of the plan itself follow.
    assert list(parts)[-1] == "notes" or "memory" in parts
