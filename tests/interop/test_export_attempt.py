"""A plan that was written for a tool is read back as the same plan, or it was refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.interop.export import ExportedFiles, export_plan
from echelon.interop.importer import detect_tool, import_file
from echelon.interop.tools import TARGETS, WRITTEN_TOOLS, TargetName, WrittenToolName
from tests.interop.plans import job_of, plans

LEAST_WRITTEN = {"megatron": 24, "deepspeed": 18, "torchtitan": 15, "accelerate": 12}
"""How many of the plans each tool can say at least."""

ALL_KINDS = ("deepseek-v3", "gpt2", "llama3.1-405b", "mistral-7b", "mixtral-8x7b", "qwen3-8b")
"""Models with every part that a preset has: experts, latent attention, windows, biases, scaling."""


def written(found: ExportedFiles, folder: Path) -> Path:
    """Write a file and those beside it, and return its path."""
    for name, text in {**found.beside, "exported.toml": found.text}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "exported.toml"


def export_or_refusal(job: Job, to: TargetName) -> ExportedFiles | ConfigError:
    """Return an export, or the error that refuses it."""
    try:
        return export_plan(job.plan, to, job)
    except ConfigError as error:
        return error


@pytest.mark.quick("megatron", "accelerate")
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
