"""The room of an expert: what is kept and what is dropped, against a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.experts import Balance, DropRule
from echelon.models.moe import kept_assignments

RULES: tuple[DropRule, ...] = ("position", "score")


def kept_by_loop(
    chosen: list[list[int]], gates: list[list[float]], sequences: list[int], room: int, rule: str
) -> list[list[bool]]:
    """Return what is kept, one assignment after the other in the order of preference."""
    places = [(n, k) for n in range(len(chosen)) for k in range(len(chosen[0]))]
    if rule == "score":
        places.sort(key=lambda place: -gates[place[0]][place[1]])
    taken: dict[tuple[int, int], int] = {}
    result = [[False] * len(chosen[0]) for _ in chosen]
    for n, k in places:
        key = sequences[n], chosen[n][k]
        taken[key] = taken.get(key, 0) + 1
        result[n][k] = taken[key] <= room
    return result


@given(seed=st.integers(0, 10_000), room=st.integers(0, 6), rule=st.sampled_from(RULES))
def test_what_is_kept_is_what_a_loop_keeps(seed: int, room: int, rule: DropRule) -> None:
    """Some gates are equal: of those the earlier token wins."""
    generator = torch.Generator().manual_seed(seed)
    length, sequences, experts = 6, 3, 4
    scores = torch.rand(length * sequences, experts, generator=generator)
    chosen_NK = scores.topk(2).indices
    gates_NK = torch.randint(1, 4, chosen_NK.shape, generator=generator) / 4
    sequence_N = torch.arange(length * sequences) % sequences
    found = kept_assignments(
        chosen_NK, gates_NK, sequence_N, num_experts=experts, capacity=room, drop=rule
    ).tolist()
    assert found == kept_by_loop(
        chosen_NK.tolist(), gates_NK.tolist(), sequence_N.tolist(), room, rule
    )


@pytest.mark.system("S35")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("factor", "room"), [(0.5, 2), (1.0, 4), (1.1, 5), (2.0, 8), (9.0, 36)])
def test_a_forced_skew_drops_exactly_what_has_no_room(
    factor: float, room: int, rule: DropRule
) -> None:
    """All of 8 tokens of each of 3 sequences go to the same 2 of 4 experts."""
    length, sequences, top_k, experts = 8, 3, 2, 4
    balance = Balance(capacity_factor=factor, drop=rule)
    assert balance.capacity(length, experts, top_k) == room
    chosen_NK = torch.arange(top_k).expand(length * sequences, top_k)
    gates_NK = torch.arange(1.0, 1 + chosen_NK.numel()).view(-1, top_k)
    sequence_N = torch.arange(length * sequences) % sequences
    kept_NK = kept_assignments(
        chosen_NK, gates_NK, sequence_N, num_experts=experts, capacity=room, drop=rule
    )
    assert int((~kept_NK).sum()) == sequences * top_k * max(0, length - room)
    kept_TBK = kept_NK.view(length, sequences, top_k)
    few = min(room, length)
    # Gates grow with the position: the first tokens win by position, the last ones by score.
    winners = kept_TBK[:few] if rule == "position" else kept_TBK[length - few :]
    assert bool(winners.all())


def test_without_a_factor_there_is_no_end_to_the_room() -> None:
    assert Balance().capacity(8, 4, 2) is None


@pytest.mark.parametrize(
    ("factor", "length", "top_k", "experts", "room"),
    [(1.0, 40, 2, 8, 10), (1.1, 40, 2, 8, 11), (1.1, 400, 1, 10, 44), (1.25, 7, 3, 8, 4)],
)
def test_the_room_is_rounded_up_once(
    factor: float, length: int, top_k: int, experts: int, room: int
) -> None:
    """Not because of the last bit of 1.1, of which 1.1 x 40 is a little more than 44."""
    assert Balance(capacity_factor=factor).capacity(length, experts, top_k) == room
