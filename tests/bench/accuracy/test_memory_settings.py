"""What rows say of memory: in columns, or in words of the columns that every file has."""

from __future__ import annotations

import pytest

from bench.accuracy.published.loss_settings import logits_held
from bench.accuracy.published.memory_settings import (
    drops_out,
    frees_gradients,
    is_compiled,
    is_pure,
    memory_kind,
    offloaded,
)
from bench.accuracy.published.models import model_of
from bench.accuracy.published.programs import Program, software_of
from bench.accuracy.published.rows import Refused, Row
from echelon.cost.inputs.cost_inputs import TrainerConstants

PURE = "bf16 (pure: parameters, gradients, states)"
SCALED = 1.0 + 4.0 / 256.0
"""Bytes of a value in 8 bits with its scale."""


def row(**cells: str) -> Row:
    return Row(id="r", cells=cells)


def software(generation: str = "fsdp2", /, **cells: str) -> TrainerConstants:
    """Return the constants of a row of a trainer with these cells."""
    program = Program(generation=generation, zero=3.0, fused=True)
    return software_of(row(**{"precision": "bf16", "year": "2025", **cells}), program)


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ({"mem_kind": "driver", "framework": "torchtune"}, "driver"),
        ({"compile_fusion_notes": "torch.cuda.max_memory_allocated"}, "allocated"),
        ({"compile_fusion_notes": "max reserved 3 MiB"}, "reserved"),
        ({"compile_fusion_notes": "MiB of nvidia-smi"}, "driver"),
        ({"framework": "torchtitan (PyTorch FSDP2)"}, "reserved"),
        ({"framework": "NeMo (Megatron-Core)"}, "allocated"),
        ({"framework": "my own"}, "reserved"),
    ],
)
def test_which_memory_a_row_means(cells: dict[str, str], kind: str) -> None:
    assert memory_kind(row(**cells)) == kind


@pytest.mark.parametrize(
    ("column", "word"),
    [
        ("mem_kind", "guessed"),
        ("state_dtype", "int3"),
        ("master_dtype", "int8"),
        ("optimizer", "newton"),
        ("loss", "whole-ish"),
    ],
)
def test_a_word_that_is_not_known_refuses_its_row(column: str, word: str) -> None:
    with pytest.raises(Refused, match=column):
        _read(**{column: word})


def _read(**cells: str) -> None:
    memory_kind(row(**cells))
    software(**cells)


@pytest.mark.parametrize(
    ("cells", "bytes_of_weight"),
    [
        ({}, (4.0, 4.0, 8.0)),
        ({"precision": PURE}, (2.0, 2.0, 4.0)),
        ({"precision": "pure bf16"}, (2.0, 2.0, 4.0)),
        ({"precision": PURE, "state_dtype": "int8", "optimizer": "adamw8bit"}, (2, 2, 2 * SCALED)),
        ({"precision": PURE, "compile_fusion_notes": "8-bit AdamW"}, (2.0, 2.0, 2 * SCALED)),
        ({"precision": PURE, "optimizer": "sgd"}, (2.0, 2.0, 2.0)),
        ({"precision": PURE, "optimizer": "lion"}, (2.0, 2.0, 2.0)),
        ({"master_dtype": "fp32", "state_dtype": "bf16", "optimizer": "adamw"}, (4.0, 4.0, 4.0)),
    ],
)
def test_bytes_of_a_weight_by_dtypes_and_optimizer(
    cells: dict[str, str], bytes_of_weight: tuple[float, float, float]
) -> None:
    """FSDP2 updates the parameters themselves: there is no copy of them in its states."""
    found = software(framework="torchtitan", **cells)
    numbers = (found.parameter_bytes, found.gradient_bytes, found.state_bytes)
    assert numbers == pytest.approx(bytes_of_weight)


def test_megatron_keeps_a_master_copy_beside_16_bits() -> None:
    named = software(
        "megatron-core-2025", master_dtype="fp32", state_dtype="bf16", optimizer="adam"
    )
    assert named.state_bytes == 4.0 + 2.0 * 2.0
    assert named.parameter_bytes == 0.0


def test_autocast_keeps_parameters_in_fp32_and_casts_beside_them() -> None:
    found = software("generic", precision="bf16 autocast (parameters in fp32)")
    assert (found.parameter_bytes, found.gradient_bytes, found.state_bytes) == (4.0, 4.0, 8.0)
    assert found.cast_bytes == 2.0
    assert not is_pure(row(precision="bf16 autocast", state_dtype="int8", master_dtype="none"))


def test_gradients_that_an_update_frees_take_nothing() -> None:
    notes = "optimizer step fused into backward (gradients freed at once)"
    assert frees_gradients(row(compile_fusion_notes=notes))
    assert software(precision=PURE, compile_fusion_notes=notes).gradient_bytes == 0.0


@pytest.mark.parametrize(
    ("cells", "optimizer", "parameters"),
    [
        ({"framework": "torchtune (single device) with CPU offload"}, True, False),
        ({"framework": "torchtune (PyTorch FSDP2) with CPU offload"}, True, True),
        ({"compile_fusion_notes": "paged 8-bit AdamW"}, True, False),
        ({"compile_fusion_notes": "optimizer offloaded"}, True, False),
        ({"compile_fusion_notes": "parameters offloaded"}, False, True),
        ({"compile_fusion_notes": "no CPU offload"}, False, False),
        ({"optimizer_offload": "host", "parameter_offload": "none"}, True, False),
        ({}, False, False),
    ],
)
def test_what_is_in_the_memory_of_the_host(
    cells: dict[str, str], optimizer: bool, parameters: bool
) -> None:
    one = row(**cells)
    assert offloaded(one, "optimizer_offload") is optimizer
    assert offloaded(one, "parameter_offload") is parameters


def test_an_unknown_place_of_states_refuses_its_row() -> None:
    with pytest.raises(Refused, match="optimizer_offload"):
        offloaded(row(optimizer_offload="moon"), "optimizer_offload")


@pytest.mark.parametrize(
    ("cells", "held"),
    [
        ({}, 14.0),
        ({"loss": "whole"}, 14.0),
        ({"loss": "in-place"}, 4.0),
        ({"loss": "fused"}, 0.25),
        ({"loss": "compiled"}, 4.0),
        ({"loss": "chunked 4"}, 4.0 + 12.0 / 4.0),
        ({"loss": "chunked 6", "compiled": "true"}, 4.0 + 6.0 / 6.0),
        ({"compile_fusion_notes": "Liger kernels"}, 0.25),
        ({"compile_fusion_notes": "chunked loss"}, 4.0 + 12.0 / 8.0),
        ({"compile_fusion_notes": "cross entropy in 16 chunks"}, 4.0 + 12.0 / 16.0),
        ({"loss": "fused", "framework": "torchtitan"}, 4.0),
        ({"loss": "fused", "framework": "Megatron-LM"}, 10.0),
    ],
)
def test_bytes_of_a_logit_by_the_loss(cells: dict[str, str], held: float) -> None:
    assert logits_held(row(**cells), 14.0) == pytest.approx(held)


@pytest.mark.parametrize(
    ("cells", "compiled"),
    [
        ({"compiled": "false", "compile_fusion_notes": "torch.compile"}, False),
        ({"compile_fusion_notes": "torch.compile, fused AdamW"}, True),
        ({"compile_fusion_notes": "no compile"}, False),
        ({"framework": "litgpt (Thunder)", "compiled": "true"}, False),
        ({}, None),
    ],
)
def test_whether_a_compiler_made_the_kernels(cells: dict[str, str], compiled: bool | None) -> None:
    assert is_compiled(row(**cells)) is compiled


def test_dropout_is_the_rows_or_the_default_of_its_trainer() -> None:
    gpt = {"framework": "Megatron-LM", "model": "GPT 7B", "gated_mlp": "false"}
    assert drops_out(row(**gpt))
    assert not drops_out(row(**gpt, compile_fusion_notes="dropout 0"))
    assert not drops_out(row(framework="Megatron-LM", model="Llama-2 7B", gated_mlp="true"))
    assert drops_out(row(framework="NeMo", model="x", compile_fusion_notes="dropout 0.1"))


def test_tied_weights_by_column_or_words() -> None:
    gpt = {"model": "GPT 7B", "layers": "4", "hidden": "512", "seq_len": "64", "gated_mlp": "false"}
    assert model_of(row(**gpt)).tied == 1.0
    assert model_of(row(**gpt, compile_fusion_notes="untied embeddings")).tied == 0.0
    assert model_of(row(**gpt, tied="false")).tied == 0.0


@pytest.mark.parametrize(
    ("cells", "held"),
    [
        ({"framework": "Megatron-LM", "loss": "in-place"}, 2.0),
        ({"framework": "Composer", "loss": "in-place"}, 4.0),
        ({"framework": "DeepSpeed", "loss": "narrow"}, 8.0),
        ({"framework": "TRL (Accelerate)", "loss": "chunked 512"}, 14.0 / 512.0),
        ({"framework": "torchtune", "loss": "chunked 8", "compiled": "true"}, 4.0 + 6.0 / 8.0),
    ],
)
def test_what_a_loss_holds_by_its_trainer(cells: dict[str, str], held: float) -> None:
    assert logits_held(row(**cells), 14.0) == pytest.approx(held)


def test_a_compiled_script_has_its_loss_in_its_graph() -> None:
    program = Program(generation="fsdp2-compiled", zero=0.0, fused=True)
    cells = {"framework": "PyTorch", "year": "2025", "compiled": "true", "precision": "bf16"}
    assert software_of(row(**cells), program).logit_held == 8.0
    assert software_of(row(**{**cells, "precision": PURE}), program).logit_held == 4.0
    for name in ("torchtune", "litgpt (Thunder)"):
        assert software_of(row(**{**cells, "framework": name}), program).logit_held == 14.0


def test_activations_and_gradients_of_a_script_and_the_host() -> None:
    away = software(compile_fusion_notes="activations offloaded to the host")
    assert (away.saved_away, software().saved_away) == (1.0, 0.0)
    layers = "inputs of the checkpointed layers in pinned host memory"
    assert software(compile_fusion_notes=layers).saved_away == 1.0
    on_device = "inputs of the checkpointed layers on the device"
    assert software(compile_fusion_notes=on_device).saved_away == 0.0
    assert software(framework="PyTorch (timm)").offloads_gradients == 0.0
    assert software(framework="torchtitan").offloads_gradients == 1.0


def test_weights_that_are_updated_in_16_bits_have_no_copy() -> None:
    cells = {"precision": PURE, "master_dtype": "bf16", "state_dtype": "bf16", "optimizer": "adamw"}
    assert software(framework="TRL (FSDP2)", **cells).state_bytes == 4.0
    assert software("deepspeed-2022", framework="DeepSpeed ZeRO-3", **cells).state_bytes == 6.0


def test_names_of_trainers_have_facts_of_their_own() -> None:
    assert software("generic", framework="nanotron").saved_whole == 1.0
    gemini = software("deepspeed-2022", framework="Colossal-AI Gemini", gradient_dtype="fp16")
    assert gemini.gradient_bytes == 0.0


@pytest.mark.parametrize(
    ("cells", "norms"),
    [
        ({"model": "Qwen3-8B"}, 256.0),
        ({"model": "Llama-3 8B"}, 0.0),
        ({"model": "Llama-3 8B", "compile_fusion_notes": "--qk-layernorm"}, 256.0),
        ({"model": "Qwen3-8B", "compile_fusion_notes": "no qk norm"}, 0.0),
    ],
)
def test_norms_of_heads_are_those_of_the_model_or_of_a_note(
    cells: dict[str, str], norms: float
) -> None:
    assert model_of(row(**cells)).head_norms == norms
