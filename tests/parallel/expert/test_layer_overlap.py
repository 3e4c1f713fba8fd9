"""What is computed while tokens travel, from the order in which motions set out and are awaited."""

from __future__ import annotations

import pytest

from echelon.core.experts import DispatchKind, ExpertLayout
from echelon.launch.local.supervisor import RankPool
from tests.parallel.expert import order as expert_order
from tests.parallel.expert.targets import mixture_plan, stream_of

WAYS: tuple[tuple[DispatchKind, int], ...] = (("flat", 2), ("flat", 4), ("two-hop", 2))


def orders(dispatch: DispatchKind, chunks: int, pool: RankPool) -> list[list[str]]:
    """Return the order of things on each of four ranks."""
    layout = ExpertLayout(dispatch=dispatch, chunks=chunks)
    plan = mixture_plan(nodes=2, dp_shard=4, ep=4, layout=layout)
    return pool.run(expert_order.mix_in_order, (plan, stream_of(plan)), world_size=4)


def halves(order: list[str]) -> tuple[list[str], list[str]]:
    """Return what happened forward and in backward."""
    middle = next(at for at, said in enumerate(order) if said.startswith("combine.backward"))
    return order[:middle], order[middle:]


@pytest.mark.parametrize(("dispatch", "chunks"), WAYS)
def test_the_next_chunk_is_under_way_while_experts_compute(
    dispatch: DispatchKind, chunks: int, rank_pool: RankPool
) -> None:
    for order in orders(dispatch, chunks, rank_pool):
        forward, backward = halves(order)
        computes = [at for at, said in enumerate(forward) if said == "experts"]
        assert len(computes) == chunks
        for chunk, at in enumerate(computes):
            assert forward[at - 1] == f"dispatch {chunk}!"
            for later in range(chunk + 1, min(chunk + 2, chunks)):
                assert forward.index(f"dispatch {later}") < at < forward.index(f"dispatch {later}!")
            # What these experts made sets out at once, and nobody waits for it yet.
            assert forward[at + 1] == f"combine {chunk}"
            assert forward.index(f"combine {chunk}!") > computes[-1]
        # Backward runs the chunks the other way round: the last one first.
        computes = [at for at, said in enumerate(backward) if said == "experts.backward"]
        assert len(computes) == chunks
        for chunk, at in zip(reversed(range(chunks)), computes, strict=True):
            assert backward[at - 1] == f"combine.backward {chunk}!"
            for later in range(chunk):
                sets_out, awaited = (f"combine.backward {later}{end}" for end in ("", "!"))
                assert backward.index(sets_out) < at < backward.index(awaited)
            assert backward[at + 1] == f"dispatch.backward {chunk}"
            awaited = backward.index(f"dispatch.backward {chunk}!")
            later = [one for one in computes if one > at]
            assert not later or awaited > later[0]


@pytest.mark.parametrize(("dispatch", "chunks"), [("flat", 1), *WAYS])
def test_shared_experts_compute_while_tokens_travel(
    dispatch: DispatchKind, chunks: int, rank_pool: RankPool
) -> None:
    for order in orders(dispatch, chunks, rank_pool):
        forward, backward = halves(order)
        at = forward.index("shared")
        assert forward.index("dispatch 0") < at < forward.index("dispatch 0!")
        at = backward.index("shared.backward")
        assert backward.index("dispatch.backward 0") < at < backward.index("dispatch.backward 0!")
