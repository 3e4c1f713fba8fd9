"""A model that is named replaces the one below; what is missing of one is told."""

from __future__ import annotations

from pathlib import Path

from echelon.config.load import load_job
from tests.config.problems import SMALL, problems_of, write


def test_a_field_of_ones_own_overrides_a_preset_and_the_model_is_called_changed() -> None:
    job = load_job("llama3-8b", ["model.layers=4"])
    assert job.plan.model.layers == 4
    assert job.plan.model.hidden == 4096
    assert job.plan.model.name == "llama3-8b-changed"
    assert load_job("llama3-8b").plan.model.name == "llama3-8b"


def test_naming_a_model_replaces_the_whole_model_of_the_layers_below(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        'extends = "nano"\n[model]\npreset = "gpt2"\n[batch]\nsequence_length = 64\n',
    )
    model = load_job(run).plan.model
    assert (model.name, model.positions, model.vocab) == ("gpt2", "learned", 50257)


def test_an_explicit_model_needs_no_preset(tmp_path: Path) -> None:
    plan = load_job(write(tmp_path, SMALL)).plan
    assert plan.model.head_dim == 4
    assert plan.num_microbatches == 48
    assert plan.cluster.name == "laptop"


def test_what_has_no_default_is_missed(tmp_path: Path) -> None:
    found = problems_of(write(tmp_path, "[mesh]\ntp = 1"))
    assert list(found) == ["missing-setting"]
    assert found["missing-setting"].key == "model"
    assert 'model.preset = "gpt2"' in found["missing-setting"].suggestions
    run = write(tmp_path, SMALL.replace("vocab = 300", "").replace("layers = 6", ""))
    assert "missing-setting" in problems_of(run)
    found = problems_of(write(tmp_path, SMALL + "\n[model.experts]\nnum_experts = 4\nffn = 6\n"))
    assert found["missing-setting"].key == "model.experts.top_k"
