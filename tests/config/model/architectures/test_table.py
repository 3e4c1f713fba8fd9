"""Each model_type says shapes in keys that its reader knows, and is split as it is on one rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.config.model.architectures.table import ARCHITECTURES
from echelon.config.model.hugging_face import config_entries
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan
from echelon.core.rulebook.model import HF_CONFIG_MODEL_TYPE
from echelon.interop.hugging_face.folder import hub_config
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import OUR_ENGINE, prove
from tests.config.model.architectures.beside import configuration, names_of
from tests.parallel.layouts import GPT2, NANO
from tests.training.weights.transformers_models import DEEPSEEK, MIXTRAL, QWEN3_MOE

WRITTEN: Mapping[str, ModelShape] = {
    "mistral": replace(NANO, window=5),
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK,
    "gpt2": GPT2,
}
"""Shapes whose config.json is ours; all other families have one of transformers."""
CHOSEN = {"falcon": "falcon 40b"}
"""Configurations with as many key heads as there are tensor ranks, where the first has fewer."""
SPLIT = (
    *("mesh.pp=2", "mesh.dp_shard=2", "mesh.tp=2", "mesh.sequence_parallel=true", "zero.stage=1"),
    *("batch.global_sequences=8", "batch.microbatch_sequences=1", "batch.sequence_length=16"),
)
FAST = ("gemma2",)
"""Families that are proven in each run of the tests."""


def test_llama_and_gemma_want_whole_heads() -> None:
    odd = replace(NANO, heads=6)
    refusals = {name: one.why_not(odd) for name, one in ARCHITECTURES.items()}
    assert [name for name, why in refusals.items() if why] == ["llama", "gemma2", "gemma3_text"]
    assert "model.hidden = 16 is no multiple of model.heads = 6 (16 % 6 = 4)" in refusals["llama"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_class_of_transformers_has_the_name(name: str) -> None:
    import transformers

    assert getattr(transformers, ARCHITECTURES[name].name).config_class.model_type == name


def split_plan(kind: str, folder: Path) -> Plan:
    """Return the plan of a family's config.json over data, tensor and pipeline ranks."""
    shape = WRITTEN.get(kind)
    if shape is None:
        configuration(CHOSEN.get(kind) or names_of(kind)[0]).save_pretrained(folder)
    else:
        keys = hub_config(shape, kind).keys
        (folder / "config.json").write_text(json.dumps(keys))
    # The ids of bytes, which a run file reads unless it says otherwise, need more rows.
    return load_job("nano", (f"model.hf_config={folder}", "model.vocab=261", *SPLIT)).plan


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_each_family_is_planned_over_data_tensor_and_pipeline_ranks(
    kind: str, tmp_path: Path
) -> None:
    plan = split_plan(kind, tmp_path)
    assert (plan.mesh.pp, plan.mesh.dp, plan.mesh.tp) == (2, 2, 2)
    assert plan.layout.sequence_parallel
    has = (plan.model.experts is not None, plan.model.latent is not None)
    assert has == (ARCHITECTURES[kind].experts, ARCHITECTURES[kind].latent)
    assert plan.model.assumed == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow)
        for kind in ARCHITECTURES
    ],
)
def test_each_family_is_proven_over_data_tensor_and_pipeline_ranks(
    kind: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    """Losses, gradients, updates and bytes of eight ranks are those of one process."""
    plan = split_plan(kind, tmp_path)
    proof = prove(plan, run_ranks=rank_pool.run, subject=OUR_ENGINE, own_precision=False)
    proof.require()
    assert proof.shrunk_plan.mesh == plan.mesh


@pytest.mark.parametrize(
    ("kind", "lacks"),
    [
        ("llama4_text", ("chunks of the sequence", "scale queries by the position", "weighted")),
        ("qwen3_next", ("Gated DeltaNet", "a gate on the output", "its shared expert has a gate")),
    ],
)
def test_what_a_family_lacks_here_is_said(kind: str, lacks: tuple[str, ...]) -> None:
    config = {"model_type": kind, "num_hidden_layers": 4, "hidden_size": 64}
    entries, problems = config_entries(config, Path("config.json"), "test")
    assert entries == {}
    (problem,) = problems
    assert problem.rule == HF_CONFIG_MODEL_TYPE.id
    for part in (kind, "is not computed", "What there is", *lacks):
        assert part in problem.message
