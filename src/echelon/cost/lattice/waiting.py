"""Bytes that wait for W where backward is split, for arrays of plans.

After B a linear layer keeps its input and the gradient of its output until W uses both (Qi et al.,
"Zero Bubble Pipeline Parallelism", 2023, section 3), whether its block was recomputed or not. A
block of N tokens, in elements, cut over t tensor ranks, D / t of a stream that is cut:

    attention   D (split) + (2 query_dim + 2 kv_dim) / t + D
    latent      the same with its way down to vectors and up again, the way down not cut
    MLP         D (split) + ffn (1 + up) / t + D; of experts: of each row that a token sends

How many microbatches wait, of all layers of the last rank: min(m, p) (zb-h1), min(m, 2p - 1)
(zb-h2), p from 2p - 1 microbatches on (zb-v), p / 2 (dualpipe, dualpipe-v), as the lists of
`schedule/` have it.
"""

from __future__ import annotations

import numpy as np

from echelon.cost.lattice.block import Work
from echelon.cost.lattice.numbers import Num
from echelon.cost.lattice.pipeline import schedule_is

STRAIGHT, FAR, BENT, BOTH_WAYS = ("zb-h1",), ("zb-h2",), ("zb-v",), ("dualpipe", "dualpipe-v")


def waiting_bytes(work: Work, plain: Num, mixtures: Num) -> Num:
    """Return what waits for W on the last rank of a pipeline, of so many blocks of each kind."""
    count = _microbatches(work)
    if not np.any(np.asarray(count) > 0.0):
        return 0.0
    blocks = plain * _of_block(work, mixture=False)
    if np.any(np.asarray(mixtures) > 0.0):
        blocks = blocks + mixtures * _of_block(work, mixture=True)
    return count * blocks


def _microbatches(work: Work) -> Num:
    layout = work.layout
    p, m = layout.pp, layout.microbatches
    found: Num = np.where(schedule_is(layout, *STRAIGHT), np.minimum(m, p), 0.0)
    found = np.where(schedule_is(layout, *FAR), np.minimum(m, 2.0 * p - 1.0), found)
    found = np.where(schedule_is(layout, *BENT), np.clip(m - p + 1.0, 0.5, p), found)
    return np.where(schedule_is(layout, *BOTH_WAYS), np.minimum(m, p / 2.0), found)


def _of_block(work: Work, *, mixture: bool) -> Num:
    model, tp = work.model, work.layout.tp
    stream = np.where(np.asarray(work.layout.sequence_parallel) > 0, tp, 1.0)
    both = model.hidden * (1.0 + 1.0 / stream)
    plain = (2.0 * model.query_dim + 2.0 * model.kv_dim) / tp
    down = 2.0 * (model.query_rank + model.kv_rank) - model.rope_dim
    up = (model.value_dim + model.query_dim + model.kv_up_dim) / tp
    attention = both + np.where(np.asarray(model.kv_rank) > 0, down + up, plain)
    if mixture:
        rows = (model.top_k + model.shared_experts) * model.expert_ffn * (1.0 + model.up) / tp
        inner = rows + 2.0 * model.top_k * model.hidden * work.layout.expert_tp / tp
        inner = inner + np.where(np.asarray(model.shared_experts) > 0, both, 0.0)
    else:
        inner = both + model.ffn * (1.0 + model.up) / tp
    return work.element * work.tokens * (attention + inner)
