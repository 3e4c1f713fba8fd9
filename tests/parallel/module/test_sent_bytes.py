"""The bytes of a pair of layers, by hand; what ranks really send is in tests/parallel/module."""

from __future__ import annotations

from echelon.core.attention_mask import AttentionMask
from echelon.core.plan import Context, Zero
from echelon.layout.modules import (
    UNSPLIT,
    ModuleSplit,
    SequenceRegion,
    SplitLayer,
    StackedExperts,
    plan_stage_buckets,
)
from echelon.parallel.module.context import SeenCall
from tests.layout.test_modules import STAGE_PARAMETERS, STAGE_UNITS
from tests.parallel.layouts import plan_of
from tests.parallel.module.sent_bytes import (
    ExpertCall,
    module_context_bytes,
    module_expert_bytes,
    module_pipeline_bytes,
    module_tensor_bytes,
)

UP = SplitLayer(name="b.up", kind="column", layer="linear", inputs=6, outputs=8, entry="b#0")
GATE = SplitLayer(name="b.gate", kind="column", layer="linear", inputs=6, outputs=8, entry="b#0")
DOWN = SplitLayer(name="b.down", kind="row", layer="linear", inputs=8, outputs=6, entry="b.down")


def split(sequence: SequenceRegion | None = None) -> ModuleSplit:
    """Return a gated pair over two ranks."""
    layers = (UP, GATE, DOWN)
    return ModuleSplit(degree=2, pieces=(), layers=layers, summed=frozenset(), sequence=sequence)


def test_a_pair_sends_one_sum_each_way() -> None:
    one_sum = 2 * 10 * 4 * 6 // 2
    assert module_tensor_bytes(split(), 10, 4) == 2 * one_sum
    assert module_tensor_bytes(split(), 10, 4, backward=False) == one_sum


def test_along_the_sequence_it_sends_as_much_in_halves_and_the_ends() -> None:
    half = 10 * 4 * 6 // 2
    region = SequenceRegion(blocks=("b",), width=6)
    assert module_tensor_bytes(split(region), 10, 4) == 4 * half + 2 * half


def test_one_rank_sends_nothing() -> None:
    assert module_tensor_bytes(UNSPLIT, 10, 4) == 0


def test_gathered_keys_by_hand() -> None:
    plan = plan_of(
        cp=2, microbatches=3, sequence_length=8, context=Context(kind="gathered"), dtype="fp64"
    )
    call = SeenCall(heads=4, kv_heads=2, head_dim=3, mask=AttentionMask())
    # A row is 2 K h numbers of 8 bytes; half of 8 rows go to the other rank three times: forward,
    # backward, gradients. The sizes of the plan's own model do not matter.
    one = 4 * (2 * 2 * 3) * 8 * 3 * plan.layout.microbatch_sequences
    assert module_context_bytes(plan, [call], rank=1) == 3 * one
    assert module_context_bytes(plan, [call, call], rank=0) == 6 * one


CALL = ExpertCall(tokens=10, width=6, choices=2, leaving=3, arriving=5)


def sent(*, cut: bool, degree: int = 2, backward: bool = True) -> int:
    """Return the bytes of a call: elements of 2 bytes, gates of 4."""
    experts = StackedExperts(name="e", num_experts=4, cut=cut)
    return module_expert_bytes(
        experts, CALL, degree=degree, element_bytes=2, gate_bytes=4, backward=backward
    )


def test_ranks_with_all_tokens_add_up() -> None:
    tokens, gates = 10 * 6 * 2, 10 * 2 * 4
    assert sent(cut=False, backward=False) == tokens  # 2 (n - 1) / n
    assert sent(cut=False) == 2 * tokens + gates


def test_rows_travel_to_their_experts_and_back() -> None:
    counts, row, gate = 4 * 8 // 2, 6 * 2, 4
    assert sent(cut=True, backward=False) == counts + 3 * (row + gate) + 5 * row
    assert sent(cut=True) == counts + 8 * (2 * row + gate)


def test_one_rank_sends_nothing_of_experts() -> None:
    assert sent(cut=False, degree=1) == sent(cut=True, degree=1) == 0


SEVEN = 7


def test_streams_and_tied_parameters_by_hand() -> None:
    plan = plan_of(pp=2, microbatches=4, dtype="fp64")
    for rank in (0, 1):
        buckets = plan_stage_buckets(plan, STAGE_PARAMETERS, STAGE_UNITS, [rank])
        sent = module_pipeline_bytes(plan, buckets, rank=rank, stream_elements=SEVEN)
        # Four activations on, or four gradients back; the sum of ten tied elements over two ranks.
        assert sent == {"pp": 4 * SEVEN * 8 + 10 * 8}


def test_slices_of_a_stage_are_gathered_for_each_pass() -> None:
    zero = Zero(stage=3, accumulate="slices")
    plan = plan_of(pp=2, dp_shard=2, microbatches=4, zero=zero, dtype="fp64")
    buckets = plan_stage_buckets(plan, STAGE_PARAMETERS[1:], STAGE_UNITS, [1])
    sent = module_pipeline_bytes(plan, buckets, rank=2, stream_elements=SEVEN)
    # Three buckets of ten elements (two trained), half of each sent, for forward and backward of
    # four microbatches; the trained ones are summed after each of the four.
    assert sent == {"pp": 4 * SEVEN * 8, "dp_shard": 3 * 8 * 5 * 8 + 2 * 4 * 5 * 8}
