"""Units of parameters are whole from their gather to their release."""

from __future__ import annotations

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.bytes.transient import most_whole_bytes
from echelon.cost.peak.whole_units import WholeUnits
from echelon.layout.buckets import plan_buckets, stage_units
from echelon.layout.stage import rank_part

ZERO3 = ("mesh.dp_shard=2", "zero.stage=3")
OFFLOAD = ("zero.parameter_offload=host", "zero.optimizer_offload=host")


def plan_of(*flags: str) -> Plan:
    return load_job("nano", (*ZERO3, *flags)).plan


def run(plan: Plan) -> tuple[WholeUnits, list[int]]:
    """Run forward and backward; return the bytes in each unit."""
    part = rank_part(plan, 0)
    whole, units = WholeUnits(plan, part, plan_buckets(plan, part)), stage_units(part)
    found: list[int] = []
    for unit in units:
        whole.enter(unit)
        found.append(whole.bytes)
        whole.leave(unit)
    for unit in units[::-1]:
        whole.enter_backward(unit)
        found.append(whole.bytes)
        whole.leave_backward(unit)
    return whole, found


def test_the_most_is_what_the_bound_says() -> None:
    for flags in ((), ("zero.prefetch=2",), ("zero.unit_blocks=2",), ("model.tied=true",)):
        plan = plan_of(*flags)
        part = rank_part(plan, 0)
        whole, found = run(plan)
        assert max(found) == most_whole_bytes(plan, part, plan_buckets(plan, part)), flags
        assert whole.bytes == 0


def test_what_is_never_freed_stays_until_the_step_ends() -> None:
    whole, found = run(plan_of("zero.reshard_after_forward=never"))
    assert found == sorted(found)
    assert whole.bytes == found[-1] > 0
    whole.end_pass()
    assert whole.bytes == 0


def test_slices_that_rest_on_the_host_are_read_a_unit_ahead() -> None:
    assert run(plan_of())[0].most_reads == 0
    whole, _ = run(plan_of("model.tied=false", *OFFLOAD))
    # The unit in use and the one that is gathered give theirs up; the next one is read.
    assert whole.most_reads == 3


def test_stages_without_slices_gather_nothing() -> None:
    plan = load_job("nano", ("mesh.dp_shard=2", "zero.stage=2")).plan
    whole, found = run(plan)
    assert not whole.any
    assert set(found) == {0}


def test_codes_are_one_byte_of_a_number_and_all_else_four() -> None:
    flags = ("precision.matmul=fp8", "precision.fp8_block=32", "zero.prefetch=0")
    plain, coded = plan_of(*flags), plan_of(*flags, "zero.gather=fp8")
    part = rank_part(plain, 0)
    weights = [one for one in plan_buckets(coded, part) if one.fp8_squares and part.blocks]
    assert len(weights) == len(part.blocks)
    most = [max(run(plan)[1][: len(part.blocks)]) for plan in (plain, coded)]
    assert most[0] > most[1]
    small = {one.units: one for one in plan_buckets(coded, part) if not one.fp8_squares}
    block = weights[0]
    assert small[block.units].num_elements < block.num_elements // 32
    found = most_whole_bytes(coded, part, [block, small[block.units]])
    assert found == block.num_elements + 4 * small[block.units].num_elements
