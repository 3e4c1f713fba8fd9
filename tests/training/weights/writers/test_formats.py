"""Checkpoints that are cut at random, written for trainers and read back, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from echelon.core.errors import ConfigError
from echelon.core.model_shape import ModelShape
from echelon.training.weights.files import find_weights
from echelon.training.weights.writers.formats import planned
from tests.parallel.layouts import GPT2, NANO, QWEN
from tests.training.weights.test_export import back, drawn
from tests.training.weights.trainer_folders import (
    moments_back,
    request_of,
    stored_with_moments,
    written,
)
from tests.training.weights.transformers_models import QWEN3_MOE

assert QWEN3_MOE.experts is not None
SHARED_MOE = replace(
    QWEN3_MOE, experts=replace(QWEN3_MOE.experts, shared_experts=2, router_bias=True)
)
QWEN3 = replace(QWEN, qkv_bias=False, qk_norm=True)


@pytest.mark.parametrize(
    ("to", "shape", "more"),
    [
        ("dcp", NANO, {}),
        ("dcp", replace(QWEN3, tied=True), {}),
        ("dcp", GPT2, {"model_type": "gpt2"}),
        ("deepspeed", GPT2, {}),
        ("deepspeed", QWEN3_MOE, {}),
        ("megatron", replace(NANO, tied=True), {}),
        ("megatron", GPT2, {}),
        ("megatron", QWEN3, {}),
        ("megatron-legacy", NANO, {"tp": 2, "pp": 2}),
        ("megatron-legacy", replace(NANO, tied=True), {"pp": 2}),
        ("megatron-legacy", GPT2, {"tp": 2}),
        ("dcp", QWEN3_MOE, {}),
        ("dcp", SHARED_MOE, {}),
        ("megatron", QWEN3_MOE, {}),
        ("megatron", SHARED_MOE, {}),
        ("megatron-legacy", SHARED_MOE, {"tp": 2, "pp": 2}),
    ],
)
def test_what_is_written_is_read_back_bit_for_bit(
    to: str, shape: ModelShape, more: dict[str, Any], tmp_path: Path
) -> None:
    tensors = drawn(shape, 3)
    index = stored_with_moments(tmp_path / "checkpoint", tensors, {}, step=2)
    out = written(to, shape, tmp_path, index, **more)
    for name, one in back(out, shape).items():
        assert torch.equal(one, tensors[name]), name


def test_moments_and_the_step_go_with_a_universal_folder(tmp_path: Path) -> None:
    tensors = drawn(NANO, 3)
    moments = {
        kind: {name: one * factor for name, one in tensors.items()}
        for kind, factor in (("exp_avg", 2), ("exp_avg_sq", 3))
    }
    index = stored_with_moments(tmp_path / "checkpoint", tensors, moments, step=9)
    out = written("deepspeed", NANO, tmp_path, index)
    assert find_weights(out, NANO).step == 9
    for kind, named in moments_back(out, NANO).items():
        for name, one in named.items():
            assert torch.equal(one, moments[kind][name])
    # As DeepSpeed reads it: whole files of torch.save.
    room = out / "global_step9_universal" / "zero" / "model.norm.weight"
    assert torch.equal(torch.load(room / "exp_avg.pt")["param"], moments["exp_avg"]["norm.weight"])


def test_torch_loads_what_is_written(tmp_path: Path) -> None:
    """By torchtitan's names: the rows of queries are in pairs of neighbours there."""
    tensors = drawn(NANO, 3)
    index = stored_with_moments(tmp_path / "checkpoint", tensors, {}, step=1)
    out = written("dcp", NANO, tmp_path, index)
    q = tensors["layers.0.attention.q.weight"]
    state = {
        "norm.weight": torch.zeros(NANO.hidden),
        "layers.0.attention.qkv_linear.wq.weight": torch.zeros_like(q),
    }
    with pytest.warns(UserWarning, match="torch.distributed"):
        load(state, checkpoint_id=out, no_dist=True)
    pairs = q.view(NANO.heads, 2, NANO.head_dim // 2, -1).transpose(1, 2).reshape(q.shape)
    assert torch.equal(state["layers.0.attention.qkv_linear.wq.weight"], pairs)
    assert torch.equal(state["norm.weight"], tensors["norm.weight"])


def test_a_model_without_names_there_is_refused(tmp_path: Path) -> None:
    index = stored_with_moments(tmp_path / "checkpoint", drawn(GPT2, 3), {}, step=1)
    with pytest.raises(ConfigError, match="torchtitan has no name for") as caught:
        planned(request_of("dcp", GPT2), index)
    assert caught.value.rules == ("weights-have-names",)


def test_layers_of_two_kinds_are_refused_for_megatron(tmp_path: Path) -> None:
    assert QWEN3_MOE.experts is not None
    mixed = replace(QWEN3_MOE, experts=replace(QWEN3_MOE.experts, first_dense_layers=1))
    index = stored_with_moments(tmp_path / "checkpoint", drawn(mixed, 3), {}, step=1)
    for to in ("megatron", "megatron-legacy"):
        with pytest.raises(ConfigError, match="layers are all of one kind") as caught:
            planned(request_of(to, mixed), index)
        assert caught.value.rules == ("weights-have-names",)
    assert planned(request_of("dcp", mixed), index).names == "torchtitan"


def test_ranks_that_do_not_divide_are_refused_with_what_works(tmp_path: Path) -> None:
    index = stored_with_moments(tmp_path / "checkpoint", drawn(NANO, 3), {}, step=1)
    with pytest.raises(ConfigError, match=r"--pp is 3") as caught:
        planned(request_of("megatron-legacy", NANO, pp=3), index)
    assert set(caught.value.rules) == {"weights-ranks-divide"}
