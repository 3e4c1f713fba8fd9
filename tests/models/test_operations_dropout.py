"""Dropout: the same elements whoever holds them, at the right rate, and new ones each step."""

from __future__ import annotations

from dataclasses import replace

import torch

from echelon.core.attention_mask import PositionRun
from echelon.models.batch import TokenBatch
from echelon.models.operations import Operations, dropout_mask
from tests.models.batches import blank_batch

T, B, D = 6, 4, 32
ZEROS = torch.zeros(B, T, dtype=torch.int64)
BATCH = TokenBatch.from_rows(ZEROS, ZEROS, torch.tensor([30, 11, 7, 2]), step=5)
ROWS = torch.arange(T * B)
WHOLE = dropout_mask(ROWS, torch.zeros(T * B, D), 0.25, "layers.0.mlp", BATCH)


def test_a_slice_of_the_rows_has_the_mask_of_its_rows() -> None:
    for rows in (ROWS[:8], ROWS[8:16], ROWS[16:]):
        part = dropout_mask(rows, torch.zeros(8, D), 0.25, "layers.0.mlp", BATCH)
        assert torch.equal(part, WHOLE[rows])


def test_a_context_rank_drops_what_one_device_drops_at_its_positions() -> None:
    for runs in ((PositionRun(0, 1, 2), PositionRun(4, 1, 2)), (PositionRun(1, 2, 3),)):
        batch = BATCH.cut(runs)
        rows = torch.arange(batch.tokens_N.numel())
        mask = dropout_mask(rows, torch.zeros(len(rows), D), 0.25, "layers.0.mlp", batch)
        positions = [run.position(i) for run in runs for i in range(run.count)]
        assert torch.equal(mask, WHOLE.view(T, B, D)[positions].flatten(0, 1))


def test_a_sample_keeps_its_mask_in_any_microbatch() -> None:
    for place, sample in enumerate(BATCH.sample_ids_B):
        alone = replace(
            BATCH,
            tokens_N=torch.zeros(T, dtype=torch.int64),
            labels_N=torch.zeros(T, dtype=torch.int64),
            sample_ids_B=sample.reshape(1),
        )
        mask = dropout_mask(torch.arange(T), torch.zeros(T, D), 0.25, "layers.0.mlp", alone)
        assert torch.equal(mask, WHOLE[place::B])


def test_seed_step_site_and_sample_change_the_mask() -> None:
    like = torch.zeros(T * B, D)
    seed = dropout_mask(ROWS, like, 0.25, "layers.0.mlp", replace(BATCH, seed=1))
    step = dropout_mask(ROWS, like, 0.25, "layers.0.mlp", replace(BATCH, step=6))
    site = dropout_mask(ROWS, like, 0.25, "layers.1.mlp", BATCH)
    ids = replace(BATCH, sample_ids_B=BATCH.sample_ids_B + 1)
    for other in (seed, step, site, dropout_mask(ROWS, like, 0.25, "layers.0.mlp", ids)):
        assert 0.2 < (other != WHOLE).double().mean() < 0.55


def test_the_rate_and_the_mean_are_kept() -> None:
    like = torch.zeros(4096, 64, dtype=torch.float64)
    batch = blank_batch(1024, 4)
    mask = dropout_mask(torch.arange(4096), like, 0.1, "embedding", batch)
    assert mask.unique().tolist() == [0.0, 1 / 0.9]
    count = mask.numel()
    assert abs((mask == 0).double().mean() - 0.1) < 5 * (0.09 / count) ** 0.5


def test_no_dropout_in_evaluation_or_at_rate_zero() -> None:
    x = torch.randn(T * B, D)
    ops = Operations()
    assert ops.dropout(x, 0.0, "s", BATCH) is x
    assert ops.dropout(x, 0.5, "s", replace(BATCH, train=False)) is x
    assert not torch.equal(ops.dropout(x, 0.5, "s", BATCH), x)
