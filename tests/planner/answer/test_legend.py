"""The legend of a table of plans has the signs that the table has, and no others."""

from __future__ import annotations

import re
from dataclasses import replace

from echelon.core.mesh import Mesh
from echelon.planner.answer.legend import mesh_text, schedule_text, sign_texts
from tests.planner.search.test_candidate import CHOICE as PLAIN


def test_a_plain_plan_has_no_signs() -> None:
    assert [*sign_texts([])] == []
    plain = replace(PLAIN, mesh=Mesh(dp_shard=8), offload=False)
    assert [*sign_texts([plain])] == []
    assert mesh_text(plain) == "dp8"


def test_each_sign_that_is_shown_is_told_once() -> None:
    choices = [
        replace(PLAIN, mesh=Mesh(dp_replicate=2, dp_shard=4), offload=True),
        replace(PLAIN, mesh=Mesh(pp=2, tp=4), sequence_parallel=True, schedule="interleaved-1f1b"),
        replace(PLAIN, mesh=Mesh(cp=4, dp_shard=2), context="ulysses-ring", ulysses=2),
        replace(PLAIN, mesh=Mesh(tp=2, dp_shard=4, ep=4), expert_tp=2, sequence_parallel=False),
        replace(PLAIN, mesh=Mesh(cp=2), context="gathered"),
    ]
    choices[1] = replace(choices[1], virtual=3)
    texts = [*sign_texts(choices)]
    shown = " ".join([*map(mesh_text, choices), *map(schedule_text, choices), "+h"])
    signs = [text.partition(":")[0] for text in texts]
    assert signs == ["dp2x4", "1f1b x3", "cp4u2", "tp4s", "ep4t", "+h"]
    assert all(sign in shown for sign in signs)
    assert "2 replicas of 4 shards" in texts[0]
    assert "3 stages on a rank" in texts[1]
    for one in choices:
        for text in sign_texts([one]):
            assert re.match(r"[\w+ ]+: .+\.$", text)
