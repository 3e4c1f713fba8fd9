"""Cells of published runs: numbers, links, devices, models, and what fills a blank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.accuracy.published.devices import cluster_of
from bench.accuracy.published.known_models import known_model, published_models, words
from bench.accuracy.published.machines import device_link, machine_of, network_of, rate_of
from bench.accuracy.published.measured import active_params
from bench.accuracy.published.models import model_of
from bench.accuracy.published.neighbours import with_neighbours
from bench.accuracy.published.plans import recomputes_of
from bench.accuracy.published.programs import framework_from_name, program_of
from bench.accuracy.published.rows import Refused, Row, read_rows
from echelon.cost.bytes.model_sizes import block_weights
from echelon.cost.inputs.numbers import LayoutNumbers
from echelon.cost.seconds.trainers import FRAMEWORKS


def row(**columns: str) -> Row:
    return Row(id="r", cells=columns)


@pytest.mark.parametrize(
    ("cell", "number"),
    [
        ("", None),
        ("n/a", None),
        ("not stated", None),
        ("1,024", 1024.0),
        ("70B", 70e9),
        ("8.5 B", 8.5e9),
        ("~41 %", 41.0),
        ("1e3", 1000.0),
        ("-1", None),
        ("1e400", None),
        (None, None),
    ],
)
def test_number_of_a_cell(cell: str | None, number: float | None) -> None:
    assert Row(id="r", cells={"c": cell or ""}).number("c") == number


@pytest.mark.parametrize(
    ("cell", "flag"),
    [("true", True), ("False", False), ("yes (v2)", True), ("", None), ("maybe", None)],
)
def test_flag_of_a_cell(cell: str, flag: bool | None) -> None:
    assert Row(id="r", cells={"c": cell or ""}).flag("c") is flag


def test_file_with_other_columns_and_marks(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text('\ufeffID,GPU , note\na,H100,"two\nlines"\n,A100,x\n,,\n', encoding="utf-8")
    first, second = read_rows(path)
    assert (first.id, first.word("gpu"), first.word("note")) == ("a", "H100", "two\nlines")
    assert (second.id, second.number("layers")) == ("row-2", None)


@pytest.mark.parametrize(
    ("text", "gigabytes_per_device", "interfaces"),
    [
        ("RoCE 1600Gb/s per node (=200Gb/s per GPU)", 25.0, 0.0),
        ("IB NDR 400Gb/s per GPU (DGX H100 reference; derived)", 50.0, 0.0),
        ("8x HDR IB 200Gb/s per node", 25.0, 8.0),
        ("4x HDR IB 200Gb/s per node (800Gb/s per node)", 12.5, 4.0),
        ("4x Omni-Path 100Gb/s per node", 6.25, 4.0),
        ("RoCE 4x100Gb/s per node", 6.25, 4.0),
        ("400Gb/s per node", 6.25, 0.0),
        ("400 GB/s per node", 50.0, 0.0),
        ("IB (HDR; count not in source)", 25.0, 0.0),
        ("EFA 3200 Gbps", 50.0, 0.0),
        ("25GbE Ethernet", 3.125 / 8, 1.0),
        ("InfiniBand NDR", 50.0, 0.0),
    ],
)
def test_network_of_a_text(text: str, gigabytes_per_device: float, interfaces: float) -> None:
    network = network_of(text, 8.0)
    assert network is not None
    assert network.bandwidth == pytest.approx(gigabytes_per_device * 1e9)
    assert network.interfaces == interfaces


def test_network_that_nothing_is_said_of() -> None:
    assert network_of("some fabric", 8.0) is None
    assert rate_of("some fabric") is None


@pytest.mark.parametrize(
    ("text", "usual", "gigabytes"),
    [
        ("NVLink3 600GB/s", 300e9, 300.0),
        ("NVLink4 450 GB/s", 450e9, 450.0),
        ("NVLink (A800, 400GB/s duplex; derived)", 200e9, 200.0),
        ("bridge of 50 GB/s each way", 25e9, 25.0),
    ],
)
def test_a_printed_rate_is_of_the_way_that_the_link_has(
    text: str, usual: float, gigabytes: float
) -> None:
    assert device_link(text, usual)[1] == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize(
    ("gpu", "memory_gb"),
    [
        ("A100-80GB", 80),
        ("NVIDIA A100-SXM4-40GB", 40),
        ("A100", 80),
        ("H100 SXM5 80GB HBM3", 80),
        ("H200-141GB", 141),
        ("AMD MI300X", 192),
        ("V100-SXM2-16GB", 16),
    ],
)
def test_device_by_its_words(gpu: str, memory_gb: float) -> None:
    one = row(gpu=gpu, n_gpus="8")
    assert machine_of(one).memory_bytes == pytest.approx(memory_gb * 1e9, rel=0.1)
    assert not [note for note in one.assumed if note.field == "gpu"]


def test_unknown_device_takes_the_nearest_and_says_so() -> None:
    one = row(gpu="H2000-96GB", n_gpus="8", gpus_per_node="8")
    assert machine_of(one).peak_flops > 9e14
    assert ("gpu", "h200") in [(note.field, note.value) for note in one.assumed]


def test_fp8_counts_for_products_and_not_for_attention() -> None:
    machine = machine_of(row(gpu="H100-80GB", precision="FP8-CS"))
    assert machine.peak_flops == pytest.approx(2 * machine.attention_flops, rel=0.01)
    old = row(gpu="A100-80GB", precision="fp8")
    assert machine_of(old).peak_flops == 312e12
    assert [note.why for note in old.assumed if note.field == "precision"]


def test_links_of_a_rack_join_more_than_a_node() -> None:
    machine = machine_of(row(gpu="GB200", gpus_per_node="4", precision="NVFP4"))
    near, far = machine.tiers
    assert (near.degree, machine.node) == (72.0, 72.0)
    assert far.bandwidth == 50e9
    assert machine.peak_flops == 1e16


def test_shared_experts_follow_from_what_a_token_meets() -> None:
    columns = {"layers": "24", "hidden": "2048", "heads": "16", "vocab": "151936"}
    columns |= {"moe_experts": "60", "moe_topk": "4", "moe_ffn": "1408", "params_active": "2.7B"}
    model = model_of(row(seq_len="2048", gated_mlp="true", model="A mixture", **columns))
    assert (model.shared_experts, model.top_k, model.expert_ffn) == (4.0, 4.0, 1408.0)


def test_names_of_models_end_at_words() -> None:
    assert words("Qwen3 30B-A3B") == words("qwen3-30b-a3b")
    assert known_model("Llama-3 405B")["layers"] == 126
    assert known_model("DeepSeek-V3 671B")["latent"]["kv_rank"] == 512
    assert known_model("GPT 200B") == {}


def test_blank_sizes_come_from_the_name_and_the_row_wins() -> None:
    one = row(model="Llama-3 70B", seq_len="8192", layers="4")
    model = model_of(one)
    assert (model.layers, model.hidden, model.up) == (4.0, 8192.0, 2.0)
    known = model_of(row(model="Qwen3 30B-A3B", seq_len="4096", layers="48", hidden="2048"))
    assert (known.query_dim, known.experts, known.top_k) == (4096.0, 128.0, 8.0)


def test_blank_sizes_come_from_the_parameters() -> None:
    columns = {"params_total": "175e9", "hidden": "12288", "vocab": "50257", "gated_mlp": "false"}
    assert model_of(row(seq_len="2048", pp="8", **columns)).layers == 96.0
    bare = model_of(row(seq_len="2048", model="GPT 13B"))
    assert 12 * bare.layers * bare.hidden**2 == pytest.approx(13e9, rel=0.15)
    with pytest.raises(Refused, match="layers or hidden are blank"):
        model_of(row(seq_len="2048", model="secret"))


def test_heads_that_hidden_is_no_multiple_of_have_a_usual_width() -> None:
    model = model_of(row(seq_len="1", layers="36", hidden="2880", heads="64", gated_mlp="true"))
    assert model.query_dim == 64 * 64


def test_a_blank_is_filled_from_rows_of_its_publisher_only() -> None:
    here = {"source": "github.com/a/b, table 1", "hidden": "1024"}
    rows = [
        Row(id="1", cells={**here, "heads": "16"}),
        Row(id="2", cells={**here, "source": "github.com/a/b, table 2", "heads": ""}),
        Row(id="3", cells={**here, "source": "github.com/c/d", "heads": ""}),
    ]
    _, second, third = with_neighbours(rows)
    assert second.word("heads") == "16"
    assert [note.field for note in second.assumed] == ["heads"]
    assert third.word("heads") == ""


def test_notes_are_json() -> None:
    one = row(gpu="Quantum 9", model="x")
    machine_of(one)
    assert json.dumps([note.value for note in one.assumed])


def test_a_device_that_nobody_knows_is_taken_to_be_what_was_usual() -> None:
    for year, usual in (("2022", "a100-80gb"), ("2025", "h100")):
        one = row(gpu="Quantum 9", n_gpus="8", gpus_per_node="8", year=year)
        assert machine_of(one).peak_flops > 3e14
        assert ("gpu", usual) in [(note.field, note.value) for note in one.assumed]


@pytest.mark.parametrize(
    ("gpu", "teraflops", "gib"),
    [
        ("TPU v5p", 459, 95),
        ("TPU v4", 275, 32),
        ("TPU v6e-256", 918, 32),
        ("Trainium1", 190, 32),
        ("AWS Trn2", 667, 96),
        ("Gaudi2", 432, 96),
        ("GH200-96GB", 989, 96),
        ("RTX 3090", 71, 24),
        ("RTX 4090", 165, 24),
        ("NVIDIA GeForce RTX 5090", 209.5, 32),
        ("RTX 6000 Ada", 364.2, 48),
        ("A10", 125, 24),
        ("A10G", 70, 24),
        ("H100-96GB-HBM2e", 989, 96),
        ("A100-40GB PCIe", 312, 40),
        ("MI300X", 1300, 192),
        ("H20", 148, 96),
        ("L40S", 362, 48),
    ],
)
def test_devices_of_many_kinds(gpu: str, teraflops: float, gib: float) -> None:
    machine = machine_of(row(gpu=gpu, n_gpus="8", precision="bf16"))
    assert machine.peak_flops == pytest.approx(teraflops * 1e12)
    assert machine.memory_bytes == pytest.approx(gib * 2**30, rel=0.1)


@pytest.mark.parametrize(
    ("gpu", "teraflops"),
    [("RTX 4090", 330), ("RTX 5090", 419), ("L4", 242.5), ("L40S", 733), ("RTX PRO 6000", 1007.6)],
)
def test_cards_have_a_dense_peak_of_fp8(gpu: str, teraflops: float) -> None:
    one = row(gpu=gpu, n_gpus="8", precision="fp8")
    assert machine_of(one).peak_flops == pytest.approx(teraflops * 1e12)
    assert not [note for note in one.assumed if note.field in ("gpu", "precision")]


def test_a_limit_of_power_slows_what_computes() -> None:
    free = machine_of(row(gpu="H100-80GB"))
    capped = machine_of(row(gpu="H100-96GB-HBM2e-500W"))
    assert capped.peak_flops == pytest.approx(float(free.peak_flops) * (5 / 7) ** (1 / 3))
    assert capped.memory_bandwidth == 2.4e12


def test_full_precision_has_its_own_peak() -> None:
    assert machine_of(row(gpu="A100", precision="tf32")).peak_flops == 156e12
    assert machine_of(row(gpu="A100", precision="fp32")).peak_flops == 156e12
    assert machine_of(row(gpu="A100", precision="fp32, plain")).peak_flops == 19.5e12
    assert machine_of(row(gpu="V100-16GB", precision="fp32")).peak_flops == 15.7e12
    assert machine_of(row(gpu="MI300X", precision="mxfp8")).peak_flops == 2610e12


@pytest.mark.parametrize(
    ("framework", "year", "zero", "compiled", "generation"),
    [
        ("NeMo 2.0", 2025, 1, False, "megatron-core-2025"),
        ("Primus (Megatron)", 2024, 1, False, "megatron-core"),
        ("MaxText", 2024, 3, False, "jax"),
        ("Colossal-AI", 2023, 1, False, "deepspeed-2022"),
        ("DeepSpeed ZeRO-3", 2021, 3, False, "deepspeed"),
        ("OLMo-core", 2025, 3, False, "fsdp2"),
        ("HF Accelerate", 2023, 3, False, "fsdp"),
        ("MyTrainer", 2023, 3, False, "fsdp"),
        ("MyTrainer", 2025, 3, False, "fsdp2"),
        ("nanotron", 2024, 1, False, "generic"),
        ("GPT-NeoX", 2022, 1, False, "megatron-deepspeed"),
        ("Megatron-LM", 2021, 0.0, False, "megatron"),
        ("Megatron-LM", 2023, 0.0, False, "megatron-core"),
        ("NeMo", 2025, 1.0, False, "megatron-core-2025"),
        ("Megatron Core", 2026, 1.0, False, "megatron-core-2026"),
        ("Megatron_DeepSpeed", 2022, 1.0, False, "megatron-deepspeed"),
        ("Megatron-DeepSpeed", 2022, 0.0, False, "megatron"),
        ("DeepSpeed", 2021, 3.0, False, "deepspeed"),
        ("DeepSpeed", 2022, 3.0, False, "deepspeed-2022"),
        ("PyTorch FSDP", 2023, 3.0, True, "fsdp-compiled"),
        ("torchtitan", 2024, 3.0, True, "fsdp2-compiled"),
        ("MaxText", 2024, 3.0, True, "jax"),
        ("a trainer of our own", 2023, 3.0, False, "fsdp"),
        ("a trainer of our own", 2024, 3.0, False, "fsdp2"),
        ("a trainer of our own", 2024, 1.0, False, "generic"),
    ],
)
def test_trainers_by_name(
    framework: str, year: int, zero: float, compiled: bool, generation: str
) -> None:
    assert framework_from_name(framework, year=year, zero=zero, compiled=compiled) == generation
    assert generation in FRAMEWORKS


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("3", 3.0),
        ("ZeRO-2", 2.0),
        ("hsdp", 3.0),
        ("FULL_SHARD", 3.0),
        ("SHARD_GRAD_OP", 2.0),
        ("none", 0.0),
        ("distributed optimizer", 1.0),
    ],
)
def test_stage_of_a_text(text: str, stage: float) -> None:
    one = row(zero_stage=text, framework="x", year="2024")
    assert program_of(one).zero == stage
    assert not [note for note in one.assumed if note.field == "zero_stage"]


@pytest.mark.parametrize(
    ("notes", "generation"),
    [("torch.compile; AsyncTP", "fsdp2-compiled"), ("no compile", "fsdp2"), ("", "fsdp2")],
)
def test_whether_a_trainer_is_compiled(notes: str, generation: str) -> None:
    one = row(framework="torchtitan", year="2024", zero_stage="3", compile_fusion_notes=notes)
    assert program_of(one).generation == generation


def test_a_stage_that_there_is_not_is_said() -> None:
    one = row(zero_stage="9", framework="PyTorch FSDP", year="2024")
    assert program_of(one).zero == 3.0
    assert "unknown" in [note.value for note in one.assumed if note.field == "zero_stage"]


@pytest.mark.parametrize(
    ("text", "share", "selective"),
    [
        ("50%", 0.5, 0.0),
        ("0.25", 0.25, 0.0),
        ("block 10", 0.5, 0.0),
        ("full/block/5", 0.25, 0.0),
        ("uniform 1", 1.0, 0.0),
        ("True", 1.0, 0.0),
        ("no recompute", 0.0, 0.0),
        ("every 2", 0.5, 0.0),
        ("5 layers", 0.25, 0.0),
        ("core_attn", 0.0, 1.0),
        ("selective (core attention)", 0.0, 1.0),
    ],
)
def test_recompute_of_a_text(text: str, share: float, selective: float) -> None:
    (one,) = recomputes_of(text, 20.0, cuts_parameters=False)
    assert (one.share, one.selective) == (share, selective)


def test_sizes_of_a_mixture_from_its_parameters() -> None:
    columns = {"model": "Some 30B-A3B", "params_total": "30e9", "moe_experts": "128"}
    model = model_of(row(seq_len="4096", moe_topk="8", gated_mlp="true", **columns))
    layers, hidden = float(model.layers), float(model.hidden)
    assert 12 * layers * hidden**2 == pytest.approx(3e9, rel=0.3)
    assert 3 * layers * hidden * model.expert_ffn * 128 == pytest.approx(30e9, rel=0.1)


def test_every_published_model_has_sizes_that_make_a_model() -> None:
    for name, sizes in published_models().items():
        assert {"layers", "hidden", "heads", "kv_heads", "ffn", "vocab"} <= set(sizes), name
        assert sizes["heads"] % sizes["kv_heads"] == 0, name
    kimi = model_of(row(model="Kimi K2", seq_len="4096"))
    assert (kimi.experts, kimi.kv_rank, kimi.dense_layers) == (384.0, 576.0, 1.0)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("DeepSeek-V3", 671e9, 37e9), ("DeepSeek-V2-Lite", 15.7e9, 2.4e9), ("Kimi K2", 1.03e12, 32e9)],
)
def test_weights_of_latent_models_are_those_that_are_printed(
    name: str, total: float, active: float
) -> None:
    """V2-Lite leads only keys and values down: its queries come of the stream."""
    one = row(model=name, seq_len="4096")
    model, whole = model_of(one), LayoutNumbers()
    dense, mixed = (sum(block_weights(model, whole, mixture=one)) for one in (False, True))
    mixtures = float(model.mixture_layers)
    layers = (float(model.layers) - mixtures) * dense + mixtures * mixed
    assert float(layers) + 2 * model.vocab * model.hidden == pytest.approx(total, rel=0.01)
    assert active_params(one, model) == pytest.approx(active, rel=0.05)


@pytest.mark.parametrize(
    ("gpu", "known"),
    [("8xA100-80GB", "A100"), ("AMD Instinct MI250", "MI250X"), ("4 x H200", "H200")],
)
def test_a_device_is_told_by_what_is_its_own_in_a_name(gpu: str, known: str) -> None:
    assert known in cluster_of(row(gpu=gpu, n_gpus="8")).device.name
