"""Each loop over pieces runs several times in a proof, the last time with less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import pytest

from echelon.core.parameters import parameters
from echelon.core.piece_sizes import PROOF_PIECES, TRAINING_PIECES, PieceSizes
from echelon.core.plan import Plan
from echelon.proof.shrink import shrink
from echelon.proof.whole_run.own_data import MAX_BYTES
from echelon.proof.whole_run.whole_run import PROMPTS
from tests.parallel.layouts import plan_of

ITEM = 8
"""Bytes of a number of a proof in float64."""


def loops(plan: Plan) -> dict[str, Sequence[tuple[int, float]]]:
    """For each kind of piece the loops over it: how much there is, and what a unit of it takes."""
    model, length = plan.model, plan.mathematics.sequence_length
    tokens = plan.layout.microbatch_sequences * length
    shapes = [(spec.shape[0], spec.shape[1]) for spec in parameters(model) if len(spec.shape) > 1]
    elements = [(spec.numel, 1) for spec in parameters(model)]
    return {
        "row_elements": [(tokens, width) for width in (model.hidden, model.ffn)],
        "gpu_row_elements": [(tokens, width) for width in (model.hidden, model.ffn)],
        "loss_rows": [(tokens, 1)],
        "product_rows": [(tokens, 1)],
        "score_rows": [(length, 1)],
        "score_columns": [(length, 1)],
        "prompt_queries": [(len(prompt), 1) for prompt in PROMPTS],
        "random_elements": shapes,
        "gpu_random_elements": shapes,
        "norm_elements": elements,
        "update_elements": elements,
        "gpu_update_elements": elements,
        "buffer_bytes": [(rows, width * ITEM) for rows, width in shapes],
        "merged_bytes": [(rows, 2 * width * ITEM) for rows, width in shapes],
        "compared_bytes": [(rows, width * ITEM) for rows, width in shapes],
        "text_bytes": [(MAX_BYTES, 1)],
        "shard_tokens": [(MAX_BYTES, 1)],
    }


WHOLE = {
    "tile_rows": "a tile is at least as long as this; windows of a proof are of any length",
    "score_elements": "1: a block has as few rows as it may",
    "shared_bytes": "not cut: what is larger is sent",
    "record_rows": "rows of the run's own files: of any number",
    "file_bytes": "a page is the smallest transfer of a file",
    "muon_buckets": "buckets of a rank: three in a proof",
    "muon_results": "of these",
}
"""Sizes of which no loop has a last piece that is shorter, and why."""


@pytest.mark.parametrize("field", [field.name for field in fields(PieceSizes)])
def test_a_loop_of_a_proof_has_several_pieces_and_a_shorter_last_one(field: str) -> None:
    size = getattr(PROOF_PIECES, field)
    assert size < getattr(TRAINING_PIECES, field)
    cut = loops(shrink(plan_of(), precision="fp64"))
    assert cut.keys() | WHOLE.keys() == {field.name for field in fields(PieceSizes)}
    if field not in WHOLE:
        pieces = [(there, max(1, size // each)) for there, each in cut[field]]
        assert any(there > piece and there % piece for there, piece in pieces), pieces
