"""What a rank of a cut module sends, by hand; on real ranks in `tests/parallel/module/pipeline`."""

from __future__ import annotations

from echelon.core.plan import Zero
from echelon.cost.bytes.modules.pipeline import module_pipeline_bytes
from echelon.layout.modules.stages import plan_stage_buckets
from tests.layout.modules.test_stages import PARAMETERS, UNITS
from tests.parallel.layouts import plan_of

SEVEN = 7


def test_streams_and_tied_parameters_by_hand() -> None:
    plan = plan_of(pp=2, microbatches=4, dtype="fp64")
    for rank in (0, 1):
        buckets = plan_stage_buckets(plan, PARAMETERS, UNITS, [rank])
        sent = module_pipeline_bytes(plan, buckets, rank=rank, stream_elements=SEVEN)
        # Four activations on, or four gradients back; the sum of ten tied elements over two ranks.
        assert sent == {"pp": 4 * SEVEN * 8 + 10 * 8}


def test_slices_of_a_stage_are_gathered_for_each_pass() -> None:
    zero = Zero(stage=3, accumulate="slices")
    plan = plan_of(pp=2, dp_shard=2, microbatches=4, zero=zero, dtype="fp64")
    buckets = plan_stage_buckets(plan, PARAMETERS[1:], UNITS, [1])
    sent = module_pipeline_bytes(plan, buckets, rank=2, stream_elements=SEVEN)
    # Three buckets of ten elements (two trained), half of each sent, for forward and backward of
    # four microbatches; the trained ones are summed after each of the four.
    assert sent == {"pp": 4 * SEVEN * 8, "dp_shard": 3 * 8 * 5 * 8 + 2 * 4 * 5 * 8}
