"""What auto means of ZeRO and step lines, and the reason that stands as its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.automatic import (
    BUCKET_LATENCY_SHARE,
    MIB,
    MODULE_BUCKET_BYTES,
    MOST_LINES,
    default_tensor_overlap,
)
from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import rank_part
from tests.config.problems import SMALL, write


@pytest.mark.parametrize(
    ("steps", "every"),
    [
        (1, 1),
        (200, 1),
        (201, 2),
        (400, 2),
        (401, 5),
        (10_000, 50),
        (10**6, 5_000),
    ],
)
def test_step_lines_are_200_at_most_unless_it_is_said(steps: int, every: int) -> None:
    settings = [f"train.steps={steps}", "optimizer.warmup_steps=0"]
    job = load_job("nano", settings)
    assert job.observe.log_every == every
    assert steps // every <= MOST_LINES
    assert job.source_of("observe.log_every").startswith("derived: 200 lines at most")
    assert load_job("nano", [*settings, "observe.log_every=1"]).observe.log_every == 1
    assert load_job("nano", [*settings, "observe.log_every=auto"]).observe.log_every == every


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


@pytest.mark.parametrize(
    ("stage", "accumulate"), [(0, "whole"), (1, "whole"), (2, "slices"), (3, "slices")]
)
def test_gradients_add_up_as_the_stage_holds_them(small: Path, stage: int, accumulate: str) -> None:
    mesh = ["mesh.dp_shard=2"] if stage else ["mesh.dp_replicate=2"]
    job = load_job(small, [*mesh, f"zero.stage={stage}"])
    assert job.plan.layout.zero.accumulate == accumulate
    assert job.source_of("zero.accumulate").startswith(f"derived: stage {stage} holds")
    row = next(row for row in job.sources if row.key == "zero.accumulate")
    assert row.value == f'"{accumulate}"'
    other = "slices" if accumulate == "whole" else "whole"
    if stage:
        chosen = load_job(small, [*mesh, f"zero.stage={stage}", f"zero.accumulate={other}"])
        assert chosen.plan.layout.zero.accumulate == other
        assert chosen.source_of("zero.accumulate") == f"--set zero.accumulate={other}"


STAGE_3 = ["mesh.dp_shard=2", "zero.stage=3"]


@pytest.mark.parametrize(
    ("sets", "reshards", "why"),
    [
        ([], True, "there is no pipeline"),
        (["batch.microbatch_sequences=24"], True, "there is no pipeline"),
        (
            ["mesh.pp=2", "pipeline.schedule=gpipe", "batch.microbatch_sequences=24"],
            True,
            "there is one microbatch",
        ),
        (["mesh.pp=2"], False, "are within half of a device, 1.00 GiB"),
        (["mesh.pp=2", "model.vocab=4000000"], True, "are more than half of a device, 1.00 GiB"),
    ],
)
def test_units_are_kept_through_a_pipeline_where_memory_allows(
    small: Path, sets: list[str], reshards: bool, why: str
) -> None:
    job = load_job(small, [*STAGE_3, *sets])
    assert job.plan.layout.zero.reshard_after_forward is reshards
    source = job.source_of("zero.reshard_after_forward")
    assert source.startswith("derived: ")
    assert why in source
    for word, chosen in (("always", True), ("never", False)):
        other = load_job(small, [*STAGE_3, *sets, f"zero.reshard_after_forward={word}"])
        assert other.plan.layout.zero.reshard_after_forward is chosen


def test_the_limit_of_keeping_units_is_half_of_the_memory_of_a_device(tmp_path: Path) -> None:
    device = """
    name = "boxes"
    devices_per_node = 4
    [device]
    name = "card"
    memory_bytes = {memory}
    memory_bandwidth = 1e9
    [[links]]
    name = "bus"
    bandwidth = 1e9
    latency_s = 1e-6
    """
    run = write(tmp_path, SMALL + '\n[cluster]\nfile = "boxes.toml"\n')
    sets = [*STAGE_3, "mesh.pp=2", "precision.parameters=bf16"]
    write(tmp_path, device.format(memory=2**40), "boxes.toml")
    plan = load_job(run, sets).plan
    needed = max(held_with_whole_parameters(plan, stage) for stage in (0, 1))
    for memory, reshards in ((2 * needed, False), (2 * needed - 2, True)):
        write(tmp_path, device.format(memory=memory), "boxes.toml")
        assert load_job(run, sets).plan.layout.zero.reshard_after_forward is reshards


def held_with_whole_parameters(plan: Plan, stage: int) -> int:
    """Return bytes by hand: bf16 whole, and slices of bf16 + fp32 gradients, master, 2 moments."""
    buckets = plan_buckets(plan, rank_part(plan, stage))
    elements = sum(bucket.num_elements for bucket in buckets)
    assert all(bucket.sliced for bucket in buckets)
    return 2 * elements + (2 + 4 + 4 + 4 + 4) * elements // 2


GPUS = "cluster.preset=64xh100"


def _bucket_bytes(*settings: str, model: str = "llama3-8b") -> tuple[int, str]:
    """Return the bytes of a bucket of a model on GPUs, and where they are from."""
    sizes = ["batch.global_sequences=4096", "batch.sequence_length=128"]
    job = load_job("nano", [f"model.preset={model}", GPUS, *sizes, *settings])
    return job.plan.layout.zero.bucket_bytes, job.source_of("zero.bucket_bytes")


def test_buckets_grow_with_the_ranks_over_which_they_are_summed() -> None:
    sizes = [_bucket_bytes(f"mesh.dp_replicate={ranks}")[0] for ranks in (16, 64)]
    assert MODULE_BUCKET_BYTES < sizes[0] < sizes[1]
    # 12 waits of a tree for 64 ranks, of 4 us each, are a tenth of what a bucket takes.
    link = load_job("nano", [GPUS]).plan.cluster.links[-1]
    seconds = sizes[1] * 63 / 64 / link.bandwidth
    assert 12 * link.latency_s <= BUCKET_LATENCY_SHARE * seconds
    assert 12 * link.latency_s > BUCKET_LATENCY_SHARE * (seconds - MIB / link.bandwidth)
    assert "over 64 data ranks" in _bucket_bytes("mesh.dp_replicate=64")[1]


def test_what_was_asked_for_is_the_size_of_a_bucket() -> None:
    asked = _bucket_bytes("mesh.dp_replicate=64", "zero.bucket_bytes=7 MiB")
    assert asked == (7 * MIB, "--set zero.bucket_bytes=7 MiB")


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama3-8b", ()),
        ("llama3-8b", ("mesh.dp_shard=64", "zero.stage=3")),
        ("nano", ("mesh.dp_replicate=64",)),
    ],
)
def test_a_bucket_is_the_usual_one_where_nothing_asks_for_more(
    model: str, settings: tuple[str, ...]
) -> None:
    """Alone, at stage 3 (a bucket is a unit), and where it would be much of all gradients."""
    assert _bucket_bytes(*settings, model=model)[0] == MODULE_BUCKET_BYTES


def test_buckets_of_processors_are_the_usual_ones(small: Path) -> None:
    job = load_job(small, ["mesh.dp_replicate=2"])
    assert job.plan.layout.zero.bucket_bytes == MODULE_BUCKET_BYTES
    assert job.source_of("zero.bucket_bytes").startswith("derived: 25.00 MiB")


@pytest.mark.parametrize(
    ("cluster", "tp", "found", "why"),
    [
        ("laptop", 2, "none", "ranks of one machine"),
        ("2xcpu", 4, "ring", "several machines"),
        ("8xh100", 8, "symmetric-memory", "NVLink joins the 8"),
        ("16xh100", 16, "ring", "not NVLink"),
        ("8xl40s", 2, "ring", "not NVLink"),
    ],
)
def test_how_products_overlap_follows_from_what_joins_the_ranks(
    cluster: str, tp: int, found: str, why: str
) -> None:
    job = load_job("nano", [f"cluster.preset={cluster}"])
    overlap, source = default_tensor_overlap(job.plan.cluster, tp)
    assert overlap == found
    assert source.startswith("derived: ")
    assert why in source


def test_an_overlap_that_is_left_to_us_is_resolved() -> None:
    flags = ["mesh.tp=2", "mesh.sequence_parallel=true", "mesh.tp_overlap=auto"]
    job = load_job("nano", [*flags, "cluster.preset=2xh100"])
    assert job.plan.layout.tp_overlap == "symmetric-memory"
    (row,) = [one for one in job.sources if one.key == "mesh.tp_overlap"]
    assert (row.value, row.source) == (
        '"symmetric-memory"',
        "derived: NVLink joins the 2 tensor ranks",
    )
