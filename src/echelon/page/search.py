# SPDX-License-Identifier: Apache-2.0
"""The page of a search: the plan to run, and why; what else there is, and what was refused."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.units import binary_bytes
from echelon.interop.tools import tool_of_trainer
from echelon.page.document import PageDocument, Section
from echelon.page.figures import DataTable
from echelon.page.plan import plan_page
from echelon.planner.answer.legend import sentence_words, sign_texts
from echelon.planner.answer.recommend_text import (
    OTHERS_HEADER,
    answer_facts,
    next_commands,
    other_rows,
    other_signs,
    percent_of_fit,
    plan_words,
    reasons,
)
from echelon.planner.predict.bands import fit_probability
from echelon.planner.recommend.recommend import Recommendation
from echelon.planner.search.search import SearchResult


def search_page(found: Recommendation | SearchResult, command: str) -> PageDocument:
    """Return the page of the best plan of a search that `command` asks for, then how it was found.

    A search that found no plan has no page: it is an error before.
    """
    answer = found.answer if isinstance(found, Recommendation) else found
    plan = answer.first.plan
    assert plan is not None, "what is the best of an answer has become a Plan"
    page = plan_page(plan)
    return PageDocument(
        title=page.title,
        subject=page.subject,
        verdict=page.verdict,
        good=page.good,
        facts=page.facts,
        sections=(*_found_sections(found, answer, command), *page.sections),
        made_by=page.made_by,
    )


def _found_sections(
    found: Recommendation | SearchResult, answer: SearchResult, command: str
) -> Iterator[Section]:
    if isinstance(found, Recommendation):
        yield Section(
            id="why",
            title="The plan to run, and why",
            summary=" ".join(reasons(found)),
            table=DataTable(head=("", "what"), rows=tuple(answer_facts(found))),
            commands=(
                command,
                *next_commands(command, tool_of_trainer(answer.request.trainer)),
            ),
        )
        if rows := other_rows(found):
            yield Section(
                id="others",
                title="Plans that somebody may prefer",
                summary=" ".join(
                    (
                        "Each is better at something; seconds are beside the recommended plan's.",
                        *other_signs(found),
                    )
                ),
                table=DataTable(head=OTHERS_HEADER, rows=tuple(rows), right=(2, 3, 4, 5)),
            )
    yield _ranked(answer)
    if answer.refused:
        refused = sorted(answer.refused.items(), key=lambda item: -item[1])
        yield Section(
            id="refused",
            title="Plans that rules refused",
            summary=f"{sum(answer.refused.values()):,} plans were refused, {answer.num_legal:,} "
            "are legal. `echelon explain RULE` says why each is a rule.",
            table=DataTable(
                head=("rule", "plans"),
                rows=tuple((rule, f"{count:,}") for rule, count in refused),
                right=(1,),
            ),
        )


def _ranked(answer: SearchResult) -> Section:
    """Return the plans that were ranked, the first one first."""
    memory = answer.request.memory_bytes
    fits = [fit_probability(one.estimate, memory) for one in answer.ranked]
    signs = sign_texts(
        [word for ranked in answer.ranked for word in sentence_words(ranked.candidate)]
    )
    count = f"{len(answer.ranked)} plans, the best first, of {answer.num_legal:,} legal ones."
    return Section(
        id="rivals",
        title="The plans that come next",
        summary=" ".join((count, *signs)),
        table=DataTable(
            head=("plan", "seconds of a step", "memory of the fullest rank", "fits"),
            rows=tuple(
                (
                    plan_words(one.candidate),
                    f"{one.estimate.step_s:.4g}",
                    binary_bytes(one.estimate.bytes_held),
                    percent_of_fit(fit),
                )
                for one, fit in zip(answer.ranked, fits, strict=True)
            ),
            right=(1, 2, 3),
        ),
    )
