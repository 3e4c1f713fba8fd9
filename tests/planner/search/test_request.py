"""What is asked of a search: models, clusters, defaults that are told, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from echelon.core.errors import ConfigError
from echelon.cost.seconds.trainers import FRAMEWORKS
from echelon.interop.tools import ALSO_CALLED
from echelon.planner.search.request import (
    SearchAim,
    make_request,
    request_with_settings,
    trainer_meant,
)
from echelon.planner.search.search import search
from tests.planner.requests import LLAMA_CONFIG


def test_products_may_be_computed_in_another_dtype_than_parameters() -> None:
    """Recipes of other trainers in fp8: products at its peak, attention at that of bf16."""
    aim = SearchAim(trainer="megatron-core-2025", top=1)
    pins = ["dp=4", "cp=2", "zero=1", "microbatch=1", "recompute=none", "offload=none"]
    half = make_request("llama3-8b", cluster="8xh100", pins=pins, aim=aim)
    eight = replace(half, matmul_dtype="fp8")
    device = half.cluster.device
    assert half.machine_numbers(8).peak_flops == device.flops("bf16")
    assert eight.machine_numbers(8).peak_flops == device.flops("fp8")
    assert eight.machine_numbers(8).attention_flops == device.flops("bf16")
    slow, fast = (search(one).first.estimate for one in (half, eight))
    assert fast.seconds["matmul"] < 0.6 * slow.seconds["matmul"]
    assert fast.seconds["attention"] == pytest.approx(slow.seconds["attention"])
    assert fast.bytes["activations"] < slow.bytes["activations"]


def test_a_config_json_is_a_model(tmp_path: Path) -> None:
    config = dict(LLAMA_CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        request = make_request(str(path), cluster="8xh100")
        assert request.model.layers == 4
        assert request.mathematics.sequence_length == 2048
        assert request.mathematics.global_sequences == 2048
        assert len(request.defaults_taken) == 3
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(ConfigError) as caught:
        make_request(str(tmp_path), cluster="8xh100")
    assert caught.value.rules == ("hf-config-model-type",)
    assert "layers = 4, hidden = 256, heads = 4, ffn = 512, vocab = 1000" in str(caught.value)
    unknown = {"model_type": "mamba", "hidden_size": 64, "vocab_size": True}
    (tmp_path / "config.json").write_text(json.dumps(unknown))
    with pytest.raises(
        ConfigError, match=r"hidden = 64, which the file has, and layers \(num_"
    ) as e:
        make_request(str(tmp_path), cluster="8xh100")
    assert "vocab (vocab_size)" in str(e.value)
    assert "which it lacks" in str(e.value)
    del config["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="vocab_size"):
        make_request(str(tmp_path), cluster="8xh100")


@pytest.mark.parametrize(
    ("model", "cluster", "rule", "works"),
    [
        ("lama3-8b", "8xh100", "unknown-preset", "llama3-8b"),
        ("zzz", "8xh100", "unknown-preset", "config.json"),
        ("llama3-8b", "8xh10", "unknown-preset", "8xh100"),
        ("llama3-8b", "12xh100", "whole-nodes", "16xh100"),
    ],
)
def test_names_that_are_none_are_told_with_the_nearest(
    model: str, cluster: str, rule: str, works: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_request(model, cluster=cluster)
    assert caught.value.rules == (rule,)
    assert any(works in text for text in caught.value.problems[0].suggestions)


def test_files_that_change_places_are_told_what_they_are(tmp_path: Path) -> None:
    boxes, run = tmp_path / "boxes.toml", tmp_path / "run.toml"
    boxes.write_text("devices_per_node = 8\n[device]\nname = 'x'\n")
    run.write_text('extends = "nano"\n')
    with pytest.raises(ConfigError, match="describes a cluster") as caught:
        make_request(str(boxes), cluster="8xh100")
    assert caught.value.problems[0].suggestions[1] == f"echelon plan MODEL --cluster {boxes}"
    with pytest.raises(ConfigError, match=r"describes a run \(extends\), not a cluster"):
        make_request("nano", cluster=str(run))
    with pytest.raises(ConfigError, match="a cluster file"):
        make_request("nano", cluster="zzz")


def test_the_layout_of_a_run_file_is_left_aside_and_its_cluster_gives_way(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        'extends = "nano"\n[mesh]\ntp = 2\ndp_shard = 2\n[zero]\nstage = 3\nprefetch = 2\n'
        '[cluster]\npreset = "4xcpu"\n'
    )
    assert make_request(run).cluster.name == "4xcpu"
    request = make_request(run, cluster="8xh100", settings=["mesh.tp=4"])
    assert request.cluster.name == "8xh100"
    assert request.one_rank_run.mesh.world_size == 1
    assert request.pins.values_of("tp") == (4,)


def test_a_price_and_a_trainer_are_needed_where_they_are_asked_for() -> None:
    with pytest.raises(ConfigError) as caught:
        make_request("nano", cluster="8xh100", aim=SearchAim(objective="cost"))
    assert caught.value.rules == ("objective-needs-price",)
    with pytest.raises(ConfigError) as caught:
        make_request("nano", cluster="8xh100", aim=SearchAim(trainer="megatron-cor"))
    assert caught.value.rules == ("unknown-trainer",)
    assert "megatron-core" in caught.value.problems[0].suggestions


def test_all_that_is_wrong_with_an_aim_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make_request(
            "nano",
            cluster="8xh100",
            aim=SearchAim(objective=cast("Any", "speed"), price=float("inf"), trainer="megatorn"),
        )
    assert caught.value.rules == ("unknown-trainer", "bad-argument", "bad-argument")


def test_only_gpus_have_a_context() -> None:
    on_processors = make_request("nano", cluster="4xcpu").software
    assert on_processors.context_bytes == on_processors.connection_bytes == 0.0
    on_gpus = make_request("nano", cluster="4xh100").software
    assert (on_gpus.context_bytes, on_gpus.connection_bytes) == (0.5e9, 32 * 14 * 2**20)


def test_other_trainers_keep_the_sums_that_they_have() -> None:
    ours = make_request("nano", cluster="8xh100", settings=["precision.parameters=bf16"])
    other = make_request(
        "nano",
        cluster="8xh100",
        settings=["precision.parameters=bf16"],
        aim=SearchAim(trainer="deepspeed"),
    )
    assert (ours.software.gradient_bytes, ours.software.element_bytes) == (4.0, 2.0)
    assert (other.software.gradient_bytes, other.software.element_bytes) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("Megatron-LM", "megatron-core-2025"),
        ("megatron_core", "megatron-core"),
        ("MegatronCore 2026", "megatron-core-2026"),
        ("TorchTitan", "fsdp2"),
        ("torch titan", "fsdp2"),
        ("FSDP-2", "fsdp2"),
        ("DeepSpeed", "deepspeed-2022"),
        ("DeepSpeed 2021", "deepspeed"),
        ("Echelon", "echelon"),
    ],
)
def test_a_trainer_is_known_in_any_case_and_with_any_sign_between(typed: str, meant: str) -> None:
    assert trainer_meant(typed) == meant
    request = make_request("nano", cluster="8xh100", aim=SearchAim(trainer=typed))
    assert request.trainer == meant


def test_no_two_trainers_are_spelled_alike() -> None:
    names = {*FRAMEWORKS, *ALSO_CALLED}
    assert len({re.sub(r"\W|_", "", name) for name in names}) == len(names)


def test_trainers_near_to_a_wrong_name_are_offered() -> None:
    with pytest.raises(ConfigError) as caught:
        make_request("nano", cluster="8xh100", aim=SearchAim(trainer="Torch-Titen"))
    assert caught.value.problems[0].suggestions[0] == "torchtitan"


def test_other_settings_of_a_run_are_those_of_the_command_line() -> None:
    request = make_request("llama3-8b", cluster="8xh100")
    low = {"precision.parameters": "bf16", "precision.gradients": "bf16"}
    sets = [f"{key}={value}" for key, value in low.items()]
    typed = make_request("llama3-8b", cluster="8xh100", settings=sets)
    changed = request_with_settings(request, low)
    assert (changed.mathematics, changed.software) == (typed.mathematics, typed.software)
    with pytest.raises(ConfigError, match="gradients-hold-parameters"):
        request_with_settings(request, {**low, "precision.parameters": "fp32"})


def test_a_batch_that_nobody_asked_for_follows_the_length_of_sequences(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    request = make_request(tmp_path, cluster="8xh100")
    shorter = request_with_settings(request, {"batch.sequence_length": 512})
    sets = ["batch.sequence_length=512"]
    typed = make_request(tmp_path, cluster="8xh100", settings=sets)
    assert shorter.mathematics == typed.mathematics
    assert shorter.mathematics.global_sequences == 4 * request.mathematics.global_sequences
    asked = make_request(tmp_path, cluster="8xh100", settings=["batch.global_sequences=7"])
    shorter = request_with_settings(asked, {"batch.sequence_length": 512})
    assert shorter.mathematics.global_sequences == 7
