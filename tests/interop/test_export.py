"""What a tool cannot honour is refused by name, with who can; what it leaves open is told."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.core.errors import ConfigError, Problem
from echelon.interop.export import ExportedRun, export_plan
from echelon.interop.importer import detect_tool, import_file
from echelon.interop.tools import TARGETS, WRITTEN_TOOLS, TargetName, WrittenToolName
from tests.interop.plans import job_of, plans

RULE = "export-not-expressible"
ZB_V = ("mesh.pp=2", "pipeline.schedule=zb-v")

LEAST_WRITTEN = {"megatron": 24, "deepspeed": 18, "torchtitan": 15, "accelerate": 12}
"""How many of the plans each tool can say at least."""

ALL_KINDS = ("deepseek-v3", "gpt2", "llama3.1-405b", "mistral-7b", "mixtral-8x7b", "qwen3-8b")
"""Models with every part that a preset has: experts, latent attention, windows, biases, scaling."""


def refused(to: TargetName, *settings: str) -> dict[str, Problem]:
    """Return the problem of each setting that an export names."""
    with pytest.raises(ConfigError) as caught:
        export_plan(job_of(settings).plan, to)
    assert set(caught.value.rules) == {RULE}
    return {problem.key: problem for problem in caught.value.problems}


def test_a_schedule_names_its_reason_and_who_can() -> None:
    (problem,) = (
        refused("megatron", *ZB_V, "optimizer.decay=all", "optimizer.weight_decay=0.1")[
            "pipeline.schedule"
        ],
    )
    assert 'pipeline.schedule = "zb-v" cannot be written for Megatron-LM' in problem.message
    assert problem.message.endswith("torchtitan can say it")
    assert problem.suggestions == (
        'pipeline.schedule = "1f1b"',
        "--to torchtitan",
        "--to run.toml",
    )


@pytest.mark.parametrize(
    ("to", "settings", "keys"),
    [
        ("megatron", ("mesh.cp=2", "context.kind=striped"), {"context.kind"}),
        ("megatron", ("optimizer.decay=blocks",), {"optimizer.decay"}),
        ("megatron", ("model.soft_cap=30",), {"model.soft_cap"}),
        ("megatron", ("mesh.tp=2",), {"model.vocab"}),
        (
            "megatron",
            ("recompute.policy=full", "recompute.every=2"),
            {"recompute.every"},
        ),
        (
            "megatron",
            ("optimizer.kind=muon", "mesh.dp_shard=2", "zero.stage=1"),
            {"optimizer.kind"},
        ),
        ("deepspeed", ("optimizer.kind=muon",), {"optimizer.kind"}),
        (
            "deepspeed",
            ("optimizer.schedule=wsd", "optimizer.decay_steps=9"),
            {"optimizer.schedule"},
        ),
        ("deepspeed", ("mesh.cp=2", "zero.stage=1"), {"context.kind"}),
        ("deepspeed", ("mesh.pp=2", "mesh.dp_shard=2", "zero.stage=2"), {"zero.stage"}),
        ("deepspeed", ("mesh.tp=2", "mesh.dp_shard=2", "zero.stage=3"), {"zero.stage"}),
        ("torchtitan", (), {"optimizer.decay"}),
        ("torchtitan", ("optimizer.kind=sgd", "optimizer.weight_decay=0"), {"optimizer.kind"}),
        (
            "torchtitan",
            ("optimizer.decay=all", "mesh.dp_shard=2", "zero.stage=2"),
            {"zero.stage"},
        ),
        ("accelerate", ("mesh.pp=2",), {"mesh.pp"}),
        ("accelerate", ("mesh.tp=2",), {"mesh.tp"}),
    ],
)
def test_what_is_refused_and_nothing_else(
    to: TargetName, settings: tuple[str, ...], keys: set[str]
) -> None:
    found = refused(to, *settings)
    assert set(found) == keys
    assert all(problem.suggestions[-1] == "--to run.toml" for problem in found.values())


def test_what_is_said_to_work_works() -> None:
    (problem,) = refused("torchtitan", "mesh.dp_shard=4", "zero.stage=3").values()
    assert problem.suggestions[0] == 'optimizer.decay = "all"'
    export_plan(
        job_of(("mesh.dp_shard=4", "zero.stage=3", "optimizer.decay=all")).plan, "torchtitan"
    )
    # A stage of 3 needs ranks that share out: with whole replicas nothing is suggested.
    (problem,) = refused("deepspeed", "mesh.pp=2", "mesh.dp_shard=2", "zero.stage=3").values()
    assert "zero.stage = 1" in problem.suggestions


def test_what_a_tool_leaves_open_is_recorded_and_told() -> None:
    job = job_of(("mesh.dp_shard=4", "zero.stage=3", "zero.prefetch=2"))
    found = export_plan(job.plan, "megatron", job)
    told = {note.setting: note.why for note in found.notes}
    assert told["zero.prefetch"] == "what is gathered ahead is its own choice"
    assert "# echelon: zero.prefetch = 2" in found.text
    assert "zero.stage" not in told
    assert all(note.text().startswith(note.setting) for note in found.notes)


def test_each_file_is_of_its_kind() -> None:
    plan = job_of(("mesh.dp_shard=2", "zero.stage=3", "optimizer.decay=all")).plan
    deepspeed = json.loads(export_plan(plan, "deepspeed").text)
    assert deepspeed["zero_optimization"]["stage"] == 3
    titan = tomllib.loads(export_plan(plan, "torchtitan").text)
    assert titan["parallelism"]["data_parallel_shard_degree"] == 2
    accelerate = yaml.safe_load(export_plan(plan, "accelerate").text)
    assert accelerate["fsdp_config"]["fsdp_version"] == 2
    plan = job_of(("mesh.dp_shard=2", "zero.stage=3")).plan
    script = export_plan(plan, "megatron").text
    assert script.startswith("#!/bin/sh\n")
    assert "\ntorchrun --nnodes 1 --nproc-per-node 2 pretrain_gpt.py \\\n" in script
    assert all(len(line) <= 80 for line in script.splitlines() if line.startswith("# "))


def test_deepspeed_tells_in_one_place_what_its_json_cannot_say() -> None:
    plan = job_of(("mesh.pp=2", "mesh.tp=2", "mesh.dp_replicate=2")).plan
    notes = " ".join(json.loads(export_plan(plan, "deepspeed").text)["echelon"]["notes"])
    assert "PipelineModule(num_stages=2" in notes
    assert "num_pp=2, num_mp=2, num_dp=2" in notes
    assert "blocks of each stage (partition_method): 2, 2" in notes


def written(found: ExportedRun, folder: Path) -> Path:
    """Write a file and those beside it, and return its path."""
    for name, text in {**found.beside, "exported.toml": found.text}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "exported.toml"


def export_or_refusal(job: Job, to: TargetName) -> ExportedRun | ConfigError:
    """Return an export, or the error that refuses it."""
    try:
        return export_plan(job.plan, to, job)
    except ConfigError as error:
        return error


@pytest.mark.quick("accelerate")
@pytest.mark.parametrize("to", list(WRITTEN_TOOLS))
def test_a_few_dozen_plans(to: WrittenToolName, tmp_path: Path) -> None:
    said = 0
    for settings in plans(to):
        job = job_of(settings)
        found = export_or_refusal(job, to)
        if isinstance(found, ConfigError):
            assert set(found.rules) == {"export-not-expressible"}, settings
            continue
        path = written(found, tmp_path)
        assert detect_tool(path, found.text) == to
        assert import_file(path).job.plan == job.plan, settings
        said += 1
    assert said >= LEAST_WRITTEN[to]


@pytest.mark.slow
def test_a_run_toml_gives_the_run_again_hash_and_all(tmp_path: Path) -> None:
    for settings in plans("megatron")[::2]:
        job = job_of(settings)
        again = load_job(written(export_plan(job.plan, "run.toml", job), tmp_path))
        assert again.plan.content_hash() == job.plan.content_hash(), settings
        assert again.content_hash() == job.content_hash(), settings


def test_every_plan_is_said_by_some_tool_but_for_those_that_none_has_words_for() -> None:
    silent = [("mesh.cp=2", "context.kind=striped"), ("optimizer.kind=muon", "optimizer.decay=all")]
    for settings in silent:
        plan = job_of(settings).plan
        for to in TARGETS:
            if to != "run.toml" and not (to == "accelerate" and "muon" in settings[0]):
                with pytest.raises(ConfigError):
                    export_plan(plan, to)


@pytest.mark.parametrize("name", ALL_KINDS)
def test_flags_of_megatron_say_every_size_of_every_preset(name: str, tmp_path: Path) -> None:
    plan = load_job(name, ["cluster.preset=8xh100"]).plan
    found = export_plan(plan, "megatron")
    assert [note.setting for note in found.notes if note.setting.startswith("model.")] == [
        "model.name"
    ]
    assert import_file(written(found, tmp_path)).job.plan == plan


@pytest.mark.parametrize(("name", "flavor"), [("llama3", "70B"), ("deepseek_v3", "671B")])
def test_a_flavor_of_torchtitan_comes_back_as_it_was(
    name: str, flavor: str, tmp_path: Path
) -> None:
    file = tmp_path / "train.toml"
    lines = (
        f'[model]\nname = "{name}"\nflavor = "{flavor}"',
        "[training]\nlocal_batch_size = 1\nseq_len = 4096",
        "[parallelism]\ndata_parallel_shard_degree = 8",
    )
    file.write_text("\n".join(lines), encoding="utf-8")
    job = import_file(file, sets=["cluster.preset=8xh100"]).job
    found = export_plan(job.plan, "torchtitan", job)
    assert f'flavor = "{flavor}"' in found.text
    assert not [note for note in found.notes if note.setting.startswith(("model.", "experts."))]
    assert import_file(written(found, tmp_path)).job.plan == job.plan
