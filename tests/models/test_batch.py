"""A microbatch: sequence first, cut into the positions that a rank holds."""

from __future__ import annotations

import pytest
import torch

from echelon.core.attention_mask import PositionRun
from echelon.models.batch import IGNORED_LABEL, TokenBatch, positions_of

TOKENS_BT = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
LABELS_BT = torch.tensor([[11, 12, 13, IGNORED_LABEL], [21, IGNORED_LABEL, 23, 24]])


def whole() -> TokenBatch:
    return TokenBatch.from_rows(TOKENS_BT, LABELS_BT, torch.tensor([7, 9]), step=3, seed=5)


def test_rows_lie_sequence_first() -> None:
    batch = whole()
    assert batch.tokens_N.tolist() == [10, 20, 11, 21, 12, 22, 13, 23]
    assert batch.labels_N.tolist()[:4] == [11, 21, 12, IGNORED_LABEL]
    assert (batch.num_sequences, batch.num_positions, batch.whole_length) == (2, 4, 4)
    assert batch.num_valid() == 6
    assert (batch.step, batch.seed, batch.train) == (3, 5, True)


def test_a_cut_has_the_tokens_and_labels_of_its_positions() -> None:
    part = whole().cut((PositionRun(3, 1, 1), PositionRun(0, 2, 2)), ((0, 2), (0,)))
    assert part.positions_T.tolist() == [3, 0, 2]
    assert part.tokens_N.tolist() == [13, 23, 10, 20, 12, 22]
    assert part.labels_N.tolist() == [IGNORED_LABEL, 24, 11, 21, 13, 23]
    assert (part.num_positions, part.whole_length) == (3, 4)
    assert part.documents == ((0, 2), (0,))
    assert part.sample_ids_B.tolist() == [7, 9]


def test_no_runs_are_all_positions_and_copy_nothing() -> None:
    batch = whole()
    assert batch.cut(()).tokens_N is batch.tokens_N
    assert batch.cut(batch.runs, ((0,), (0,))).documents == ((0,), (0,))


@pytest.mark.parametrize("run", [PositionRun(0, 1, 5), PositionRun(2, 2, 2), PositionRun(4, 1, 1)])
def test_positions_beyond_the_sequences_are_refused(run: PositionRun) -> None:
    with pytest.raises(ValueError, match="goes beyond sequences of 4 positions"):
        whole().cut((run,))


def test_positions_of_runs_come_in_their_order() -> None:
    device = torch.device("cpu")
    runs = (PositionRun(1, 3, 2), PositionRun(0, 1, 1), PositionRun(9, 1, 0))
    assert positions_of(runs, device).tolist() == [1, 4, 0]
    assert positions_of(runs[:1], device).dtype == torch.int64


def test_what_counts_is_counted_before_a_batch_leaves_the_host() -> None:
    part = whole().cut((PositionRun(1, 2, 2),))
    away = part.to(torch.device("meta"))
    assert away.num_valid() == part.num_valid() == 2
    assert whole().to(torch.device("meta")).num_valid() == 6
    there = whole().moved([one.clone() for one in whole().tensors()])
    assert there.cut((PositionRun(0, 1, 1),)).num_valid() == 2, "a part has a count of its own"
    assert whole().to(torch.device("cpu")).counted is None
