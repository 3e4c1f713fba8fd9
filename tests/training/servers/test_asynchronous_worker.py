"""An asynchronous worker counts the tokens of a global batch by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch

from echelon.launch.local.supervisor import RankPool
from echelon.training.engine import _not_told
from tests.parallel.servers.test_server import served_plan
from tests.training.servers.targets import Held, parameters_to_validate
from tests.training.servers.test_served import with_updates

_TARGET = f"{parameters_to_validate.__module__}:parameters_to_validate"


def test_a_worker_that_nobody_tells_the_tokens_is_a_bug_of_ours() -> None:
    """S07: the trainer and the proof both say them; no message does."""
    with pytest.raises(AssertionError, match="how many tokens step 3"):
        _not_told(3)


@pytest.mark.parametrize("validates", [True, False])
def test_workers_validate_what_the_servers_have(rank_pool: RankPool, validates: bool) -> None:
    """S07: a fast worker has not the last pushes of slow ones, until it asks for them."""
    plan = with_updates(served_plan(2, 2), 2)
    labels = [plan.mesh.label(rank) for rank in range(plan.mesh.world_size)]
    told = {"plan": plan.to_json(), "steps": 3, "pause_s": 0.2, "validates": validates}
    ranks = rank_pool.run(_TARGET, told, plan.mesh.world_size, labels=labels)
    fast, slow, *servers = cast("Sequence[Held]", ranks)
    held = {
        name: torch.cat([values.flatten() for one in servers for _, values in one.get(name, [])])
        for name in fast
    }
    same = [_same_numbers(fast[name], held[name]) for name in fast]
    assert all(same) is validates
    assert all(_same_numbers(slow[name], held[name]) for name in slow)


def _same_numbers(whole: list[tuple[tuple[int, ...], torch.Tensor]], parts: torch.Tensor) -> bool:
    ours = torch.cat([values.flatten() for _, values in whole])
    return torch.equal(ours.sort().values, parts.sort().values)
