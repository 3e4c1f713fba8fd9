"""Every guide has one record, and every text that names one names a record."""

from __future__ import annotations

import re
from collections.abc import Iterator

from echelon.handbook.errata.claims import BETWEEN, GUIDES, SOURCES, all_claims, sources_named_in
from echelon.handbook.guides.practices import NAMED, PRACTICES
from echelon.handbook.guides.trees import TREES
from echelon.planner.lint.checks import LINTS


def _texts() -> Iterator[str]:
    yield from (each.source for each in (*LINTS, *PRACTICES, *NAMED, *TREES))
    yield from (claim.why for claim in all_claims())


def test_a_guide_is_told_by_author_title_and_year() -> None:
    for key, source in SOURCES.items():
        assert key == source.key
        assert source.author
        assert source.year
        assert str(source).startswith(f"{key}: {source.author}, {source.title}, {source.year} (")
    assert (*SOURCES, BETWEEN) == GUIDES


def test_what_names_no_paper_names_a_guide() -> None:
    for each in (*PRACTICES, *TREES, *LINTS):
        assert sources_named_in(each.source) or re.search(r"20[012]\d", each.source), each.id


def test_ids_in_texts_are_those_of_claims() -> None:
    known = {claim.id for claim in all_claims()}
    pattern = rf"\b(?:{'|'.join(GUIDES)})-\d\d[a-z]?\b"
    named = {found for text in _texts() for found in re.findall(pattern, text)}
    assert named
    assert named <= known


def test_guides_are_found_by_keys_and_by_ids_of_claims() -> None:
    found = sources_named_in("scaling, table 4; Chen et al., 2016; llm-training-34")
    assert [source.key for source in found] == ["llm-training", "scaling"]
    assert sources_named_in("between-02") == ()
