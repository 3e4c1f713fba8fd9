"""The longest sequence as facts of a page, and as an object."""

from __future__ import annotations

from echelon.core.units import binary_bytes
from echelon.planner.answer.objectives import longest_facts, longest_json
from echelon.planner.recommend.longest_sequence import LongestSequence
from echelon.planner.recommend.recommend import Recommendation, recommend
from echelon.planner.search.request import LONGEST_SEQUENCE
from tests.planner.requests import SMALL, small


def test_a_page_and_its_object_have_the_number() -> None:
    settings = [text for text in SMALL if not text.startswith("batch.sequence_length")]
    request = small(devices=2, memory_gb=1.9, settings=settings, objective=LONGEST_SEQUENCE)
    found = recommend(request)
    assert isinstance(found, Recommendation)
    longest = found.longest
    assert isinstance(longest, LongestSequence)
    assert longest.leanest is not None
    assert found.answer.request.objective == LONGEST_SEQUENCE
    plan = found.first.ranked.plan
    assert plan is not None
    assert plan.mathematics.sequence_length == plan.model.max_positions == longest.tokens
    facts = dict(longest_facts(longest))
    assert facts["longest"].startswith(f"{longest.tokens:,} tokens in a sequence")
    assert binary_bytes(longest.leanest.estimate.bytes_held) in facts["longest"]
    assert "1,024" in facts["positions"]
    told = longest_json(longest)
    assert (told["tokens"], told["too_long"]) == (longest.tokens, longest.too_long)
