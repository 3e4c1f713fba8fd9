"""A config.json whose model_type is not known: planned, told, trained where its user says yes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echelon.api.training import train
from echelon.cli.main import main
from echelon.config.files.show import resolved_toml
from echelon.config.load import load_job
from echelon.config.model.hugging_face import has_sizes, why_nothing_is_assumed
from echelon.config.rules.finders import require_yes_to_assumed
from echelon.core.errors import ConfigError
from echelon.core.model_shape import ModelShape
from echelon.interop.hugging_face.folder import hub_config
from echelon.interop.importer import import_file
from echelon.page.documents.plan import plan_page
from echelon.planner.report.report import plan_text
from echelon.planner.search.request import make_request
from tests.config.problems import problems_of

SIZES: dict[str, Any] = {
    "model_type": "newcoder",
    "architectures": ["NewCoderForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
FULL = SIZES | {
    "num_key_value_heads": 2,
    "head_dim": 6,
    "layer_norm_eps": 1e-4,
    "hidden_act": "gelu_new",
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": False,
    "qk_norm": True,
    "initializer_range": 0.1,
    "position_embedding_type": "rope",
    "bos_token_id": 1,
    "hidden_dropout": 0.1,
    "torch_dtype": "bfloat16",
    "magic": {"factor": 3.5},
}
RUN = (
    *("train.steps=2", "optimizer.warmup_steps=0"),
    *("batch.global_sequences=4", "batch.sequence_length=16"),
)


def written(folder: Path, config: dict[str, Any]) -> tuple[str, ...]:
    """Return the settings of a run of this config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    return (f"model.hf_config={folder}", *RUN)


def shape_of(folder: Path, config: dict[str, Any], *settings: str) -> ModelShape:
    return load_job("nano", (*written(folder, config), *settings)).plan.model


def test_it_is_a_decoder_like_llama_and_everything_that_is_assumed_is_told(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, SIZES)
    assert (shape.layers, shape.hidden, shape.heads, shape.ffn) == (2, 32, 4, 48)
    assert (shape.kv_heads, shape.head_dim, shape.norm_eps, shape.gated) == (4, 8, 1e-6, True)
    first, *others = shape.assumed
    assert first.startswith('model_type = "newcoder" is not known')
    named = [text.partition(" = ")[0].removeprefix("model.") for text in others]
    assert named == [
        *("kv_heads", "head_dim", "norm", "norm_eps", "gated", "positions", "rope_theta"),
        *("tied", "initial_std", "qkv_bias", "output_bias", "mlp_bias", "qk_norm"),
    ]


def test_what_its_keys_say_is_not_assumed_and_what_is_not_understood_is_named(
    tmp_path: Path,
) -> None:
    shape = shape_of(tmp_path, FULL)
    assert (shape.kv_heads, shape.head_dim, shape.norm, shape.norm_eps) == (2, 6, "layernorm", 1e-4)
    assert (shape.activation, shape.rope_theta, shape.tied) == ("gelu", 500.0, True)
    assert (shape.qkv_bias, shape.output_bias, shape.mlp_bias) == (True, True, False)
    assert (shape.qk_norm, shape.initial_std) == (True, 0.1)
    assert [text.partition(":")[0] for text in shape.assumed[1:]] == [
        'model.norm = "layernorm"',
        "model.gated = true",
        "magic = { factor = 3.5 } is not understood, and taken to change nothing",
    ]


def test_a_window_is_that_of_the_blocks_that_slide(tmp_path: Path) -> None:
    kinds = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    shape = shape_of(tmp_path, SIZES | kinds)
    assert (shape.window, shape.layer_kinds) == (8, ("global", "local"))
    assert shape_of(tmp_path, SIZES | {"sliding_window": 8}).window == 8
    off = {"sliding_window": 8, "use_sliding_window": False}
    assert shape_of(tmp_path, SIZES | off).window is None
    full = {"sliding_window": 8, "layer_types": ["full_attention"] * 2}
    assert shape_of(tmp_path, SIZES | full).window is None
    wrong = written(tmp_path, SIZES | {"sliding_window": 8, "layer_types": ["linear_attention"]})
    assert list(problems_of("nano", wrong)) == ["hf-config-value"]


def test_what_its_user_says_is_assumed_no_more(tmp_path: Path) -> None:
    before = shape_of(tmp_path, SIZES).assumed
    after = shape_of(tmp_path, SIZES, "model.gated=false", "model.kv_heads=2").assumed
    gone = set(before) - set(after)
    assert {text.partition(" = ")[0] for text in gone} == {"model.gated", "model.kv_heads"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vision_config": {"depth": 2}}, "a part that reads images"),
        ({"image_token_id": 7}, "image_token_id: a part that reads images"),
        ({"audio_tower": "x"}, "audio_tower: a part that reads sound"),
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"num_encoder_layers": 2}, "num_encoder_layers: an encoder"),
        ({"num_local_experts": 8}, "num_local_experts: a mixture of experts"),
        ({"kv_lora_rank": 8}, "kv_lora_rank: latent attention"),
        ({"ssm_cfg": {"d": 1}}, "ssm_cfg: blocks with a state"),
        ({"position_embedding_type": "absolute"}, "positions that are absolute"),
        ({"architectures": ["NewForMaskedLM"]}, "NewForMaskedLM, which is no decoder of text"),
        ({"intermediate_size": None}, "ffn (intermediate_size), which it lacks"),
        ({"hidden_size": "32"}, "hidden (hidden_size), which it lacks"),
        ({"model_type": "bloom"}, "its positions are slopes of scores"),
        ({"model_type": ""}, "no model_type"),
    ],
)
def test_another_kind_of_model_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    found = problems_of("nano", written(tmp_path, SIZES | change))
    assert list(found) == ["hf-config-model-type"]
    assert says in found["hf-config-model-type"].message


def test_keys_that_say_no_to_other_parts_are_no_part() -> None:
    said = {"is_encoder_decoder": False, "vision_config": None, "num_experts": 0, "image_size": []}
    assert why_nothing_is_assumed(SIZES | said) == ""
    assert has_sizes(SIZES)
    assert not has_sizes({**SIZES, "vocab_size": True})


def test_a_plan_tells_it_as_text_as_json_and_on_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = written(tmp_path, FULL)
    plan = load_job("nano", settings).plan
    text = " ".join(plan_text(plan).split())
    assert f"Assumed of {plan.model.name}, and may be otherwise:" in text
    assert "magic = { factor = 3.5 } is not understood" in text
    assert "assumed-model: 4 things are assumed" in text
    section = next(one for one in plan_page(plan).sections if one.id == "assumed")
    assert section.table is not None
    assert section.table.rows == tuple((one,) for one in plan.model.assumed)
    flags = [word for one in settings for word in ("--set", one)]
    assert main(["plan", "nano", *flags, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["assumed"] == list(plan.model.assumed)
    assert "assumed-model" in {note["id"] for note in told["notes"]}


def test_a_search_takes_it_and_tells_it(tmp_path: Path) -> None:
    written(tmp_path, FULL)
    asked = make_request(str(tmp_path / "config.json"), cluster="2xh100")
    assert "magic = { factor = 3.5 } is not understood, and taken to change nothing" in (
        asked.defaults_taken
    )
    assert set(asked.model.assumed) < set(asked.defaults_taken)


def test_an_import_tells_it(tmp_path: Path) -> None:
    written(tmp_path, FULL)
    file = tmp_path / "sft.yaml"
    file.write_text(f"base_model: {tmp_path}\nsequence_len: 64\nmicro_batch_size: 1\n")
    found = import_file(file, kind="axolotl")
    assert any("magic" in text for text in found.assumptions)


def test_a_run_file_that_is_written_keeps_what_is_assumed(tmp_path: Path) -> None:
    job = load_job("nano", written(tmp_path, FULL))
    (tmp_path / "run.toml").write_text(resolved_toml(job))
    again = load_job(tmp_path / "run.toml")
    assert again.plan.model.assumed == job.plan.model.assumed != ()
    assert again.plan.content_hash() == job.plan.content_hash()


def test_training_it_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = written(tmp_path, FULL)
    with pytest.raises(ConfigError) as caught:
        train("nano", settings=settings)
    (problem,) = caught.value.problems
    assert problem.rule == "assumed-model-needs-yes"
    assert problem.suggestions == ("model.assume = true",)
    assert "and 3 more that `echelon plan` lists" in problem.message
    assert problem.set_by == f"{tmp_path / 'config.json'}: model_type"
    plan = load_job("nano", settings).plan
    with pytest.raises(ConfigError):
        train(plan)  # a plan that was made in Python, too
    flags = [word for one in settings for word in ("--set", one)]
    assert main(["prove", "nano", *flags, "--set", f"train.weights={tmp_path}"]) == 2
    assert "error[assumed-model-needs-yes]" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_yes_is_part_of_the_run_and_needs_something_that_is_assumed(tmp_path: Path) -> None:
    job = load_job("nano", (*written(tmp_path, FULL), "model.assume=true"))
    require_yes_to_assumed(job.plan, job.sources)
    assert job.plan.model.assumed
    assert "and its user has said yes to that" in " ".join(plan_text(job.plan).split())
    assert list(problems_of("nano", ["model.assume=true"])) == ["assume-without-effect"]


def test_weights_of_what_was_assumed_are_written_in_the_words_of_llama(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, SIZES, "model.assume=true")
    found = hub_config(shape)
    assert found.model_type == "llama"
    assert replace(shape, assumed=(), assume=False) != shape


@pytest.mark.slow
def test_with_a_yes_it_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = train("nano", settings=[*written(tmp_path, FULL), "model.assume=true"])
    assert result.summary.steps == 2
    assert 'assumed = ["model_type' in (result.run / "run.toml").read_text()


def test_words_within_words_and_null_say_nothing() -> None:
    config = {"code_revision": "main", "position_embedding_type": None, "provision": 3}
    assert why_nothing_is_assumed(config) == ""
    assert why_nothing_is_assumed({"is_encoder_decoder": True}).endswith("an encoder")
    assert "images" in why_nothing_is_assumed({"vision_config": {"hidden_size": 4}})
