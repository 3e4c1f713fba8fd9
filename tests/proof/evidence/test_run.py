"""Parts of tensors are put together, whatever says where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echelon.proof.evidence.captured import CapturedPiece
from echelon.proof.evidence.run import (
    GRADIENTS,
    INITIAL,
    PARAMETERS,
    HeldPart,
    ProgramRun,
    Reported,
)
from echelon.proof.ranks import ObservedShard


class SilentRun(ProgramRun[HeldPart]):
    """A run whose ranks report no losses."""

    def reports(self, step: int) -> Sequence[Reported]:
        return ()


def piece(rank: int, step: int, index: list[int], values: list[float]) -> CapturedPiece:
    """Return elements of a parameter of four elements that a rank has."""
    return CapturedPiece(
        rank=rank,
        kind=PARAMETERS,
        step=step,
        name="w",
        source="w",
        index=torch.tensor(index),
        tensor=torch.tensor(values),
    )


def test_each_element_is_of_the_first_rank_that_has_it() -> None:
    parts = [
        piece(0, INITIAL, [0, 1], [1.0, 2.0]),
        piece(1, INITIAL, [1, 2, 3], [9.0, 3.0, 4.0]),
        piece(0, 0, [0, 1, 2, 3], [1.5, 2.5, 3.5, 4.5]),
    ]
    run = SilentRun({"w": (2, 2)}, parts)
    assert run.whole(PARAMETERS, INITIAL, "w").tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert run.update(0, "w").tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert run.holders(PARAMETERS, INITIAL, "w") == [0, 1]
    assert run.names(PARAMETERS, 0) == {"w"}
    assert run.kinds(0) == [PARAMETERS]
    assert run.parts(GRADIENTS, 0, "w") == ()
    assert bool(run.vector(PARAMETERS, INITIAL, "w", 0)[2:].isnan().all())


def test_a_rectangle_and_elements_are_the_same_part() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    shard = ObservedShard(
        rank=0,
        kind=PARAMETERS,
        step=0,
        name="w",
        tensor=torch.zeros(2, 1),
        global_shape=(2, 3),
        offset=(0, 2),
        primary=True,
    )
    assert shard.of(whole).tolist() == [[2.0], [5.0]]
    assert piece(0, 0, [2, 5], [0.0, 0.0]).of(whole).tolist() == [2.0, 5.0]
    shard.put_into(whole)
    assert whole[:, 2].tolist() == [0.0, 0.0]
