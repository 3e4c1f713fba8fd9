# SPDX-License-Identifier: Apache-2.0
"""The page of a search: the plan to run, and why; what else there is, and what was refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from echelon.interop.tools import tool_of_trainer
from echelon.page.documents.plan import plan_page
from echelon.planner.answer.answer import SizesAnswer, sizes_head, sizes_legend, sizes_table
from echelon.planner.answer.recommend_text import (
    OTHERS_HEADER,
    answer_facts,
    next_commands,
    next_facts,
    other_rows,
    other_signs,
    reasons,
    run_facts,
)
from echelon.planner.answer.search_text import plans_legend, plans_table
from echelon.planner.recommend.recommend import Recommendation
from echelon.planner.search.search import SearchResult
from echelon.planner.view.document import DataTable, PageDocument, Section


def search_page(found: Recommendation | SearchResult, command: str | None) -> PageDocument:
    """Return the page of the best plan of a search that `command` asks for, then how it was found.

    Python asks without a command. A search that found no plan has no page: it is an error before.
    """
    answer = found.answer if isinstance(found, Recommendation) else found
    plan = answer.first.plan
    assert plan is not None, "what is the best of an answer has become a Plan"
    page = plan_page(plan, estimate=answer.first.estimate)
    return replace(page, sections=(*_found_sections(found, answer, command), *page.sections))


def sizes_page(sizes: SizesAnswer) -> PageDocument:
    """Return the page of what to run on each of four clusters."""
    first = sizes.found[0]
    head = tuple(sizes_head(first, sizes.unknown_gpus))
    return PageDocument(
        title=f"{first.answer.request.model.name}: four clusters",
        subject=head[0],
        verdict=head[1],
        good=True,
        sections=(
            Section(
                id="sizes",
                title="The plan to run on each cluster",
                summary=sizes_legend(sizes.found),
                table=sizes_table(sizes.found),
            ),
        ),
    )


def _found_sections(
    found: Recommendation | SearchResult, answer: SearchResult, command: str | None
) -> Iterator[Section]:
    if isinstance(found, Recommendation):
        yield Section(
            id="why",
            title="The plan to run, and why",
            summary=" ".join(reasons(found)),
            table=DataTable(
                head=("", "what"),
                rows=(
                    *run_facts(answer.request),
                    *answer_facts(found),
                    *(next_facts(found, None) if command is None else ()),
                ),
            ),
            commands=_commands(answer, command),
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


def _commands(answer: SearchResult, command: str | None) -> tuple[str, ...]:
    if command is None:
        return ()
    return command, *next_commands(command, tool_of_trainer(answer.request.trainer))


def _ranked(answer: SearchResult) -> Section:
    """Return the plans that were ranked, the first one first."""
    count = f"{len(answer.ranked)} plans, the best first, of {answer.num_legal:,} legal ones."
    return Section(
        id="rivals",
        title="The plans that come next",
        summary=f"{count} {plans_legend(answer.ranked)}",
        table=plans_table(answer.ranked, memory_bytes=answer.request.memory_bytes),
    )
