"""Two plans never have the same words, and the legend has the signs of a page and no others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.mesh import Mesh
from echelon.planner.answer.legend import (
    mesh_words,
    plan_cells,
    row_words,
    schedule_word,
    sign_texts,
    words_text,
    zero_word,
)
from echelon.planner.answer.recommend_text import advice_text, other_rows, plan_words
from echelon.planner.answer.search_text import answer_text, plans_table
from echelon.planner.recommend.recommend import Recommendation, recommend
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.request import Objective, SearchAim, make_request
from echelon.planner.view.text_layout import data_text
from echelon.schedule.build import SCHEDULES
from tests.planner.search.test_candidate import CHOICE as PLAIN

WIDE = 2000  # columns: no cell goes on in the next line
SEARCHES: tuple[tuple[str, str, tuple[str, ...], Objective], ...] = (
    ("llama3-8b", "8xh100", (), "time"),
    ("llama3-70b", "32xh100", (), "time"),
    ("llama3-8b", "1xh100", (), "time"),
    ("mixtral-8x7b", "16xa100-80gb", (), "time"),
    ("qwen3-30b-a3b", "32xa100-40gb", (), "expected"),
    ("llama3-70b", "64xh100", ("context=ulysses-ring", "cp=4"), "time"),
    ("llama3-70b", "32xh100", ("zero=3", "reshard=never,always"), "time"),
    ("gpt2", "8xrtx3090", ("recompute=none,full/2,selective",), "throughput"),
    ("llama3-70b", "64xh100", ("pp=8", "schedule=interleaved-1f1b,zb-v,1f1b"), "time"),
    ("llama3-8b", "16xh100", ("dp_replicate=2", "zero=1,2,3"), "cost"),
)
OWN_WORDS = re.compile(
    r"(pp|dp|cp|tp|ep|zero)?\d+|one|rank|-|on|devices|" + "|".join(map(re.escape, SCHEDULES))
)
"""Words that a setting has too: they need no legend."""


def every_kind_of_plan() -> Iterator[CandidatePlan]:
    """Yield plans that differ in one or several choices, each another one."""
    meshes = (
        Mesh(dp_shard=8),
        Mesh(dp_replicate=8),
        Mesh(dp_replicate=2, dp_shard=4),
        Mesh(pp=2, tp=2, dp_shard=2),
        Mesh(cp=4, dp_shard=2, ep=2),
        Mesh(tp=2, dp_shard=4, ep=4),
    )
    for mesh, zero, offload, microbatch in product(meshes, (1, 3), (False, True), (1, 2)):
        base = replace(PLAIN, mesh=mesh, zero=zero, offload=offload, microbatch=microbatch)
        some = [base]
        if zero == 3:
            some += [replace(base, reshard=False), replace(base, secondary=True)]
        if mesh.pp > 1:
            some += [replace(one, schedule="interleaved-1f1b", virtual=2) for one in some]
            some += [replace(base, schedule="zb-v", virtual=2)]
        if mesh.cp > 1:
            some += [
                replace(one, context=kind, ulysses=2)
                for one in some
                for kind in CONTEXT_KINDS
                if kind != one.context
            ]
        if mesh.tp > 1:
            some += [replace(one, sequence_parallel=not one.sequence_parallel) for one in some]
        if mesh.ep > 1 and mesh.tp > 1:
            some += [replace(one, expert_tp=2) for one in some]
        for one, every in product(some, (0, 1, 4)):
            yield replace(one, recompute=every, operators=())
            yield replace(one, recompute=every, operators=("norm", "activation"))
            yield replace(one, recompute=every, operators=("attention",))


def test_plans_that_differ_have_other_words() -> None:
    plans = [*every_kind_of_plan()]
    assert len({*plans}) == len(plans) > 1000
    cells = {tuple(map(words_text, plan_cells(one))) for one in plans}
    assert len(cells) == len(plans)
    assert len({words_text(row_words(one)) for one in plans}) == len(plans)
    assert len({plan_words(one) for one in plans}) == len(plans)


def test_a_plain_plan_has_no_signs() -> None:
    assert [*sign_texts([])] == []
    plain = replace(PLAIN, mesh=Mesh(dp_shard=8), offload=False, microbatch=1, recompute=0)
    plain = replace(plain, operators=())
    assert [*sign_texts(row_words(plain))] == []
    assert words_text(mesh_words(plain)) == "dp8"


def test_each_sign_that_is_shown_is_told_once() -> None:
    choices = [
        replace(PLAIN, mesh=Mesh(dp_replicate=2, dp_shard=4), offload=True),
        replace(
            PLAIN,
            mesh=Mesh(pp=2, tp=4),
            sequence_parallel=True,
            schedule="interleaved-1f1b",
            virtual=3,
        ),
        replace(PLAIN, mesh=Mesh(cp=4, dp_shard=2), context="ulysses-ring", ulysses=2),
        replace(PLAIN, mesh=Mesh(tp=2, dp_shard=4, ep=4), expert_tp=2, sequence_parallel=False),
        replace(PLAIN, mesh=Mesh(cp=2), context="gathered"),
    ]
    words = [
        word
        for one in choices
        for word in (*mesh_words(one), schedule_word(one), zero_word(replace(one, zero=1)))
    ]
    texts = [*sign_texts((*words, *words))]
    assert [text.partition(":")[0] for text in texts] == [
        *("dpRxS", "+h", "tpNs", "1f1b xV", "cpNuU", "epNt", "cpNg"),
    ]
    assert "R replicas of S shards" in texts[0]
    assert "V stages on a rank" in texts[3]


@pytest.mark.quick("pins0", "pins2", "pins5")
@pytest.mark.parametrize(("model", "cluster", "pins", "objective"), SEARCHES)
def test_the_legend_of_a_search_is_that_of_its_rows(
    model: str, cluster: str, pins: tuple[str, ...], objective: Objective
) -> None:
    aim = SearchAim(objective=objective, price=2.0 if objective == "cost" else None)
    found = recommend(make_request(model, cluster=cluster, pins=pins, aim=aim))
    assert isinstance(found, Recommendation)
    rows = data_text(plans_table(found.answer.ranked), columns=WIDE).splitlines()[1:]
    # The last four columns are numbers of a plan, the others its words.
    words = [" ".join(row.split()[:-4]) for row in rows]
    assert len({*words}) == len({one.candidate for one in found.answer.ranked})
    _, _, below = answer_text(found.answer, columns=WIDE).partition("GiB: of the fullest rank.")
    _require_same_signs(words, below.partition("Bands of these rows")[0])

    page = advice_text(found, "echelon plan", columns=WIDE).splitlines()
    (run,) = [line.partition(" ")[2].strip() for line in page if line.startswith("run ")]
    mesh, _, *others = run.split(", ")
    cells = [row[1] for row in other_rows(found)]
    assert len({words_text(row_words(found.first.ranked.candidate)), *cells}) == 1 + len(cells)
    said = [mesh, *(part for part in others if re.fullmatch(r"(1f1b|breadth) x\d+", part))]
    _require_same_signs(
        [*said, *cells], " ".join(line for line in page if line.startswith("signs"))
    )


def _require_same_signs(texts: list[str], legend: str) -> None:
    """Compare the signs of texts with those that a legend explains, both ways."""
    told = re.findall(r"((?:1f1b|breadth) xV|[+\w/]+): ", legend)
    patterns = {sign: re.compile(re.sub("[NRSVUK]", r"\\d+", re.escape(sign))) for sign in told}
    used: set[str] = set()
    for text in texts:
        for word in _signs(text):
            if OWN_WORDS.fullmatch(word):
                continue
            matching = [sign for sign, pattern in patterns.items() if pattern.fullmatch(word)]
            assert len(matching) == 1, (word, text, legend)
            used.update(matching)
    assert used == set(patterns), (texts, legend)


def _signs(text: str) -> Iterator[str]:
    """Yield the words of a plan; operators of `rec` one by one, what stands behind a + alone."""
    for word in re.findall(r"(?:1f1b|breadth) x\d+|\S+", text):
        if re.fullmatch(r"(1/\d+\+|all\+)?(no|ac|ml|at)+", word):
            blocks, plus, letters = word.rpartition("+")
            yield from [blocks] if plus else []
            yield from re.findall("..", letters)
        elif re.fullmatch(r"(zero)?\d(\+\w)*", word):
            stage, *signs = word.split("+")
            yield stage
            yield from (f"+{sign}" for sign in signs)
        elif "=" not in word:
            yield word
