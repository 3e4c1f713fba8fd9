"""ZeRO's settings: what each needs, what "auto" becomes and why, and advice that can be taken."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.config.load import load_job
from echelon.core.plan import Plan, Zero
from echelon.core.rulebook import all_rules
from echelon.cost.bytes.held import bytes_held_by_pool
from echelon.layout.buckets import accumulates_slices, plan_buckets, shard_degree
from echelon.layout.stage import rank_part
from tests.config.problems import SMALL, problems_of, write
from tests.config.suggestions import taken
from tests.walks import examples

TWO_NODES = [
    *("cluster.preset=16xcpu-core", "batch.global_sequences=48"),
    *("zero.stage=3", "zero.secondary=true"),
]

RULE_IDS = {rule.id for rule in all_rules()}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


@pytest.mark.parametrize(
    ("sets", "rule", "says"),
    [
        (["zero.stage=4"], "out-of-range", "is above 3"),
        (["zero.stage=-1"], "out-of-range", "is below 0"),
        (["zero.stage=2"], "zero-shares-out", "dp_shard x cp = 1 x 1 = 1 rank"),
        (["zero.stage=1", "mesh.dp_replicate=4"], "zero-shares-out", "= 1 rank"),
        (["zero.stage=3", "zero.optimizer_offload=host"], "zero-shares-out", "parameter_offload"),
        (["mesh.dp_replicate=2", "zero.accumulate=slices"], "slices-need-stage", "cuts nothing"),
        (["zero.optimizer_offload=host"], "offload-needs-stage", "stage 0 < 1"),
        (
            ["zero.stage=2", "mesh.dp_shard=2", "zero.parameter_offload=host"],
            "offload-needs-stage",
            "stage 2 < 3",
        ),
        (
            ["zero.stage=1", "mesh.dp_shard=2", "zero.optimizer_offload=nvme"],
            "nvme-needs-folder",
            "names no folder",
        ),
        (
            ["zero.stage=1", "mesh.dp_shard=2", "zero.offload_dir=/tmp"],
            "no-effect",
            "nothing rests in files",
        ),
        (
            ["zero.stage=3", "mesh.dp_shard=2", "zero.offload_buffers=4"],
            "no-effect",
            "nothing rests in files",
        ),
        (["zero.offload_buffers=1"], "out-of-range", "is below 2"),
        (["zero.stage=2", "mesh.dp_shard=2", "zero.prefetch=2"], "no-effect", "zero.stage = 2"),
        (["zero.stage=2", "mesh.dp_shard=2", "zero.unit_blocks=2"], "no-effect", "by unit"),
        (["zero.stage=1", "mesh.dp_shard=2", "zero.keep_whole_below=9"], "no-effect", "stage 3"),
        (["zero.reshard_after_forward=always"], "no-effect", "zero.stage = 0"),
        (["zero.stage=3", "mesh.dp_shard=2", "zero.bucket_bytes=1000"], "no-effect", "is a unit"),
        (
            ["zero.stage=3", "mesh.dp_shard=2", "mesh.tp=2", "zero.keep_whole_below=9999"],
            "no-effect",
            "7200 elements on a rank",
        ),
        (["zero.reshard_after_forward=yes"], "unknown-choice", "is not known"),
        (
            ["zero.stage=2", "mesh.dp_shard=2", "zero.secondary=true"],
            "no-effect",
            "zero.stage = 2",
        ),
        (
            [*TWO_NODES, "mesh.dp_shard=16", "zero.reshard_after_forward=never"],
            "no-effect",
            "gathers each unit once a step",
        ),
        (
            [*TWO_NODES, "mesh.dp_shard=4"],
            "secondary-needs-nodes",
            "the 4 ranks that share out parameters are on 1 node of 8 devices, 4 / 1 = 4 on each",
        ),
        (
            [*TWO_NODES, "mesh.dp_shard=8", "mesh.dp_replicate=2"],
            "secondary-needs-nodes",
            "8 / 1 = 8 on each",
        ),
        (
            [*TWO_NODES, "mesh.dp_shard=2", "mesh.pp=8", "model.layers=8"],
            "secondary-needs-nodes",
            "2 / 1 = 2 on each",
        ),
        (
            [*TWO_NODES, "mesh.dp_shard=12"],
            "secondary-needs-nodes",
            "on 2 nodes of 8 devices, not as many on each",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_advice_that_works(
    small: Path, sets: list[str], rule: str, says: str
) -> None:
    found = problems_of(small, sets)
    assert list(found) == [rule]
    assert says in found[rule].message
    assert found[rule].set_by.startswith("--set ")
    assert found[rule].suggestions
    for advice in found[rule].suggestions:
        if rule in ("out-of-range", "unknown-choice"):
            advice = f"{found[rule].key} = {advice}"  # noqa: PLW2901
        after = problems_of(small, taken(advice.replace('"DIR"', '"/tmp"'), sets))
        assert rule not in after, (advice, after)


def test_the_ranks_that_there_are_are_offered_as_shards_first(small: Path) -> None:
    works = problems_of(small, ["zero.stage=1", "mesh.dp_replicate=4"])[
        "zero-shares-out"
    ].suggestions
    assert works == (
        "mesh.dp_shard = 4 with mesh.dp_replicate = 1",
        "mesh.dp_shard = 2 with mesh.dp_replicate = 2",
        "zero.stage = 0",
    )


def test_shards_that_do_not_fit_the_batch_or_the_cluster_are_not_offered(small: Path) -> None:
    sets = ["zero.stage=1", "batch.global_sequences=45"]
    works = problems_of(small, sets)["zero-shares-out"].suggestions
    assert works == ("mesh.dp_shard = 3", "zero.stage = 0")
    sets = ["zero.stage=1", "mesh.pp=6", "mesh.tp=1", "cluster.preset=6xcpu"]
    works = problems_of(small, sets)["zero-shares-out"].suggestions
    assert works == ('zero.optimizer_offload = "host"', "zero.stage = 0")


def test_hybrid_sharding_is_a_mesh_with_both_axes(small: Path) -> None:
    plan = load_job(small, ["mesh.dp_replicate=2", "mesh.dp_shard=3", "zero.stage=2"]).plan
    assert (plan.mesh.dp, shard_degree(plan)) == (6, 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_one_rank_alone_may_offload(small: Path, stage: int) -> None:
    home = "zero.parameter_offload" if stage == 3 else "zero.optimizer_offload"
    plan = load_job(small, [f"zero.stage={stage}", f"{home}=host"]).plan
    assert plan.mesh.world_size == 1
    assert bytes_held_by_pool(plan, 0)["host"] > 0


def test_slices_of_gradients_save_memory_with_one_microbatch_too(small: Path) -> None:
    sets = ["mesh.dp_shard=2", "zero.stage=1", "batch.microbatch_sequences=24"]
    whole, slices = (
        load_job(small, [*sets, f"zero.accumulate={how}"]).plan for how in ("whole", "slices")
    )
    assert whole.num_microbatches == slices.num_microbatches == 1
    assert bytes_held_by_pool(slices, 0)["device"] < bytes_held_by_pool(whole, 0)["device"]


def test_below_stage_3_nothing_is_left_open_in_the_plan(small: Path) -> None:
    job = load_job(small, ["mesh.dp_shard=2", "zero.stage=2"])
    assert job.plan.layout.zero == Zero(stage=2, accumulate="slices")


def test_the_folder_is_a_path_and_none_is_no_folder(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = ["mesh.dp_shard=2", "zero.stage=3", "zero.parameter_offload=nvme"]
    zero = load_job(small, [*sets, "zero.offload_dir=fast"]).plan.layout.zero
    assert zero.offload_dir == str(tmp_path / "fast")
    assert list(problems_of(small, [*sets, "zero.offload_dir=none"])) == ["nvme-needs-folder"]
    assert load_job(small, ["zero.offload_dir=none"]).plan.layout.zero.offload_dir == ""


def test_a_bucket_smaller_than_a_parameter_holds_one_unit(small: Path) -> None:
    plan = load_job(small, ["mesh.dp_shard=2", "zero.stage=1", "zero.bucket_bytes=1"]).plan
    buckets = plan_buckets(plan, rank_part(plan, 0))
    assert [len(bucket.units) for bucket in buckets] == [1] * (6 + 2)


SETTINGS = st.fixed_dictionaries(
    {
        "zero.stage": st.integers(0, 3),
        "mesh.dp_shard": st.integers(1, 3),
        "mesh.dp_replicate": st.integers(1, 2),
        "mesh.pp": st.integers(1, 2),
    },
    optional={
        "zero.accumulate": st.sampled_from(["auto", "whole", "slices"]),
        "zero.reshard_after_forward": st.sampled_from(["auto", "always", "never"]),
        "zero.prefetch": st.integers(0, 2),
        "zero.unit_blocks": st.integers(1, 3),
        "zero.keep_whole_below": st.sampled_from([0, 100]),
        "zero.bucket_bytes": st.sampled_from([25 * 2**20, 1000]),
        "zero.optimizer_offload": st.sampled_from(["none", "host", "nvme"]),
        "zero.parameter_offload": st.sampled_from(["none", "host", "nvme"]),
        "zero.offload_dir": st.just("/tmp"),
        "zero.offload_buffers": st.integers(2, 3),
    },
)


def is_legal(values: Mapping[str, object]) -> bool:
    """Say independently whether a combination can be, every part of it with an effect."""
    get = {key.partition(".")[2]: str(value) for key, value in values.items()}
    stage, shards = int(get["stage"]), int(get["dp_shard"])
    homes = (get.get("optimizer_offload", "none"), get.get("parameter_offload", "none"))
    needed = homes[1] if stage == 3 else homes[0]
    if stage == 0 and (shards > 1 or get.get("accumulate") == "slices" or homes[0] != "none"):
        return False
    if (stage > 0 and shards == 1 and needed == "none") or (stage < 3 and homes[1] != "none"):
        return False
    if ("nvme" in homes) != ("offload_dir" in get):
        return False
    if "nvme" not in homes and get.get("offload_buffers") == "3":
        return False
    ranks = shards * int(get["dp_replicate"])
    small_buckets = get.get("bucket_bytes") == "1000"
    if small_buckets and (stage == 3 or (stage == 0 and ranks == 1)):
        return False
    units = ("reshard_after_forward", "auto"), ("prefetch", "1"), ("unit_blocks", "1")
    by_unit = any(get.get(k, d) != d for k, d in (*units, ("keep_whole_below", "0")))
    return stage == 3 or not by_unit


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(SETTINGS)
def test_what_is_accepted_is_what_can_be(values: dict[str, object]) -> None:
    sets = [f"{key}={value}" for key, value in values.items()]
    sets += ["batch.global_sequences=24", "cluster.preset=64xcpu"]
    found = problems_of("nano", sets)
    assert set(found) <= RULE_IDS
    assert is_legal(values) == (not found), found
    if found:
        return
    plan = load_job("nano", sets).plan
    zero = plan.layout.zero
    assert zero.accumulate in ("whole", "slices")
    assert zero.stage > 0 or not accumulates_slices(plan)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["zero.stage=2", "mesh.dp_shard=4"], "on 1 node of 8 devices, 4 / 1 = 4 on each"),
        (["mesh.dp_replicate=16"], "zero.stage = 0 sums whole gradients: 0 < 1"),
        (
            ["zero.stage=2", "mesh.dp_shard=8", "mesh.dp_replicate=2"],
            "on 1 node of 8 devices, 8 / 1 = 8 on each",
        ),
    ],
)
def test_sums_in_hops_need_nodes(sets: list[str], says: str) -> None:
    run = ["cluster.preset=16xcpu-core", "batch.global_sequences=64", "zero.reduce=int8"]
    sets = [*run, *sets]
    found = problems_of("nano", sets)
    assert list(found) == ["reduce-needs-nodes"]
    assert says in found["reduce-needs-nodes"].message
    assert found["reduce-needs-nodes"].suggestions
    for advice in found["reduce-needs-nodes"].suggestions:
        assert "reduce-needs-nodes" not in problems_of("nano", taken(advice, sets)), advice


@pytest.mark.parametrize("kept", ["zero.reduce=int8", "zero.secondary=true"])
def test_experts_that_ranks_cannot_share_out_are_told_by_their_own_rules(kept: str) -> None:
    sets = ["mesh.ep=3", "zero.stage=3", "mesh.dp_shard=4", "batch.global_sequences=4"]
    sets += ["cluster.preset=64xh100", "batch.sequence_length=1024"]
    assert {"ep-divides-experts", "ep-divides-ranks"} <= {
        *problems_of("mixtral-8x7b", [*sets, kept])
    }
