"""What a context rank sends, by hand; on ranks in `tests/parallel/module/context`."""

from __future__ import annotations

from echelon.core.attention_mask import AttentionMask
from echelon.core.plan import Context
from echelon.cost.bytes.modules.context import module_context_bytes
from echelon.parallel.module.context.attention import SeenCall
from tests.parallel.layouts import plan_of


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
