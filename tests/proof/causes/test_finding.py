"""The axis that tells wrong ranks from right ones, and the cause that explains the most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from echelon.proof.causes.finding import (
    ProofFinding,
    distinguishing_axis,
    most_telling,
    no_cause,
    with_distinguishing_axis,
)
from echelon.proof.evidence.captured import RankReport
from echelon.proof.evidence.mesh import named_groups
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.layouts import layout
from tests.proof.verify.captures import evidence_of

HYBRID = layout(dp=4, tp=2, zero={"stage": 2}, mesh={"dp_replicate": 2, "dp_shard": 2})


def test_the_narrowest_axis_is_told() -> None:
    everyone = range(8)
    assert distinguishing_axis(named_groups(HYBRID), {2, 3, 6, 7}, everyone) == ("dp_shard", [1])
    assert distinguishing_axis(named_groups(HYBRID), {0, 1, 2, 3}, everyone) == (
        "dp_replicate",
        [0],
    )
    assert distinguishing_axis(named_groups(HYBRID), {4, 5}, everyone) == ("dp", [2])
    assert distinguishing_axis(named_groups(HYBRID), {1, 3, 5, 7}, everyone) == ("tp", [1])
    assert distinguishing_axis(named_groups(HYBRID), {0, 3}, everyone) is None
    assert distinguishing_axis(named_groups(HYBRID), set(everyone), everyone) is None
    assert distinguishing_axis(named_groups(HYBRID), set(), everyone) is None


def test_whole_parameters_have_one_data_axis() -> None:
    assert distinguishing_axis(named_groups(layout(dp=2)), {1}, range(2)) == ("dp", [1])


def test_context_ranks_are_told_from_data_ranks() -> None:
    split = layout(mesh={"cp": 2, "dp_shard": 2}, zero={"stage": 2})
    assert distinguishing_axis(named_groups(split), {1, 3}, range(4)) == ("cp", [1])
    assert distinguishing_axis(named_groups(split), {0, 1}, range(4)) == ("dp_shard", [0])
    assert distinguishing_axis(named_groups(split), {1}, range(4)) == ("dp_shard and cp", [1])
    alone = layout(mesh={"cp": 2})
    assert distinguishing_axis(named_groups(alone), {1}, range(2)) == ("cp", [1])


def test_a_finding_keeps_the_axis_that_it_has() -> None:
    finding = ProofFinding(factor="2", description="twice")
    told = with_distinguishing_axis(named_groups(HYBRID), finding, {2, 3, 6, 7}, range(8))
    assert (told.axis, told.description) == ("dp_shard", "only on dp_shard [1]: twice")
    known = with_distinguishing_axis(
        named_groups(HYBRID),
        ProofFinding(factor="2", description="twice", axis="pp"),
        {2, 3, 6, 7},
        range(8),
    )
    assert known.axis == "pp"
    assert (
        with_distinguishing_axis(named_groups(HYBRID), finding, set(range(8)), range(8)) == finding
    )


def test_ranks_that_hold_the_same_experts_are_told_from_those_that_hold_others() -> None:
    # Expert groups are 0 1 and 2 3; ranks 0 and 2 hold the same experts.
    plan = plan_of(model=MIXTRAL, dp_shard=4, ep=2)
    assert distinguishing_axis(named_groups(plan, expert=True), {2, 3}, range(4)) == ("edp", [1])
    assert distinguishing_axis(named_groups(plan, expert=True), {1, 3}, range(4)) == ("ep", [1])


def test_programs_have_the_axes_of_their_mesh() -> None:
    axes = evidence_of({}, mesh={"dp": 2, "tp": 2}, reports=[RankReport()] * 4).axes()
    assert distinguishing_axis(axes, {0, 2}, range(4)) == ("tp", [0])
    assert distinguishing_axis(axes, {2, 3}, range(4)) == ("dp", [1])
    assert distinguishing_axis(axes, {1, 2}, range(4)) is None


def fits(
    **causes: Sequence[ProofFinding],
) -> Callable[[], Iterator[tuple[str, Sequence[ProofFinding]]]]:
    return lambda: iter(causes.items())


HALF, SUM = ProofFinding("1/dp", "half", "dp"), ProofFinding("missing sum", "a part", "tp")


def test_the_cause_that_explains_more_wrong_tensors_wins() -> None:
    others = fits(a=[SUM], b=[SUM, HALF], c=[])
    assert most_telling([HALF, SUM], others) == SUM
    assert most_telling([SUM, HALF], fits(a=[SUM, HALF])) == SUM, "of equals the first"
    assert most_telling([HALF, SUM], fits(a=[SUM, HALF])) == HALF, "of equals the first"
    assert most_telling([], others) is None


def test_a_cause_that_explains_one_tensor_alone_says_so() -> None:
    told = most_telling([HALF], fits(a=[SUM], b=[SUM], c=[]))
    assert told is not None
    assert told.factor == "1/dp"
    assert (
        told.description == "half; 2 of 3 other wrong tensors are wrong in another way (a: a part)"
    )


def test_a_number_is_the_same_cause_with_the_same_value_only() -> None:
    triple, double = (ProofFinding("number", f"{v} times", value=v) for v in (3.0, 2.0))
    assert most_telling([triple], fits(a=[SUM], b=[SUM], c=[double])) == replace(
        SUM, tensor="a", description="a part; so are 2 of 3 other wrong tensors"
    )
    assert most_telling([triple], fits(a=[SUM], b=[triple], c=[triple])) == triple


def test_what_is_excluded_has_the_part_that_it_leaves() -> None:
    says = no_cause({"a factor": 0.9, "a sum over dp": 1.2})
    assert says.endswith(
        "excluded, with the part that each leaves: a factor 90 %, a sum over dp 120 %"
    )
