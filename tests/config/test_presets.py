"""Presets: published parameter counts, clusters by name and from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.config.presets import about, preset_names, read_preset
from echelon.config.rules.finders import require_trainable
from echelon.core.cluster import Link
from echelon.core.model_shape import RopeScaling
from echelon.core.parameters import num_active_parameters, num_parameters
from echelon.cost.bytes.held import bytes_held
from tests.config.problems import problems_of, write

# Elements of all tensors of the published checkpoints, a tied head counted once. GPT-3 has no
# public checkpoint: its total follows from table 2.1 of Brown et al. (2020) with GPT-2's blocks.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
}
ACTIVE = {
    "mixtral-8x7b": 12_879_925_248,
    "qwen3-30b-a3b": 3_353_032_704,
    "gpt2": 124_439_808,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    preset = read_preset("models", name)
    assert preset is not None
    assert num_parameters(load_job(name).plan.model) == PUBLISHED[name]
    assert f"{PUBLISHED[name]:,}" in about(preset.kind, preset.name)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_meets_only_its_own_experts(name: str) -> None:
    assert num_active_parameters(load_job(name).plan.model) == ACTIVE[name]


def test_every_model_but_nano_is_compared_with_what_was_published() -> None:
    assert set(preset_names("models")) == {*PUBLISHED, "nano"}


def test_nano_is_small_and_fits_the_byte_tokenizer() -> None:
    job = load_job("nano")
    require_trainable(job.plan)
    assert num_parameters(job.plan.model) < 1_000_000
    assert job.plan.model.vocab == 257


@pytest.mark.parametrize("name", preset_names("runs"))
def test_a_run_preset_can_be_trained_and_says_what_it_is(name: str) -> None:
    preset = read_preset("runs", name)
    assert preset is not None
    assert len(about(preset.kind, preset.name)) > 40
    require_trainable(load_job(name).plan)


@pytest.mark.parametrize("name", ["nano-zero3", "llama3-8b-zero3"])
def test_under_zero_3_a_rank_holds_its_share_of_everything(name: str) -> None:
    plan = load_job(name).plan
    assert (plan.layout.zero.stage, plan.mathematics.precision.parameters) == (3, "bf16")
    ranks = plan.mesh.world_size
    # 2 bytes of parameters, 4 of gradients, 4 of the master copy, 8 of the moments.
    share = 18 * num_parameters(plan.model) / ranks
    for rank in (0, ranks - 1):
        held = sum(term.bytes for term in bytes_held(plan, rank))
        assert share <= held <= 1.001 * share
    assert held < plan.cluster.device.memory_bytes / 2


def test_llama_31_stretches_its_positions() -> None:
    assert load_job("llama3.1-405b").plan.model.rope_scaling == RopeScaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("device", preset_names("clusters"))
@pytest.mark.parametrize("nodes", [1, 2, 64])
def test_whole_nodes_make_a_cluster(device: str, nodes: int) -> None:
    preset = read_preset("clusters", device)
    assert preset is not None
    per_node = preset.tables["devices_per_node"]
    assert isinstance(per_node, int)
    cluster = load_job("nano", [f"cluster.preset={nodes * per_node}x{device}"]).plan.cluster
    assert cluster.num_devices == nodes * per_node
    assert (cluster.nodes, cluster.devices_per_node) == (nodes, per_node)
    assert cluster.links[-1].degree == cluster.num_devices
    speeds = [link.bandwidth for link in cluster.links]
    assert speeds == sorted(speeds, reverse=True)
    assert cluster.backend == ("gloo" if device.startswith("cpu") else "nccl")


def test_bandwidth_is_bytes_in_one_direction() -> None:
    cluster = load_job("nano", ["cluster.preset=16xh100"]).plan.cluster
    assert cluster.device.flops("bf16") == 989e12
    assert cluster.device.flops("fp8") == 1979e12
    assert cluster.device.flops("int4") is None
    # NVLink 4: 900 GB/s both ways; InfiniBand NDR: 400 Gb/s.
    assert [link.bandwidth for link in cluster.links] == [450e9, 50e9]


def test_part_of_a_node_has_no_network() -> None:
    assert [
        link.degree for link in load_job("nano", ["cluster.preset=4xh100"]).plan.cluster.links
    ] == [4]
    assert load_job("nano", ["cluster.preset=1xh100"]).plan.cluster.links == ()


CLUSTER = """
name = "two boxes"
nodes = 2
devices_per_node = 4
[device]
name = "card"
memory_bytes = 16_000_000_000
memory_bandwidth = 600e9
[device.peak_flops]
bf16 = 100e12
[[links]]
name = "PCIe 4 x16"
degree = 4
bandwidth = 25e9
latency_s = 5e-6
[[links]]
name = "Ethernet"
degree = "all"
bandwidth = 1.25e9
latency_s = 30e-6
"""


def test_a_cluster_comes_from_a_file(tmp_path: Path) -> None:
    write(tmp_path, CLUSTER, "boxes.toml")
    run = write(tmp_path, 'extends = "nano"\n[cluster]\nfile = "boxes.toml"')
    cluster = load_job(run).plan.cluster
    assert (cluster.name, cluster.num_devices, cluster.backend) == ("two boxes", 8, "nccl")
    assert cluster.links[1] == Link(name="Ethernet", degree=8, bandwidth=1.25e9, latency_s=30e-6)
    found = problems_of(run, ["mesh.dp_replicate=16", "batch.microbatch_sequences=1"])
    assert list(found) == ["fits-cluster"]
    assert "two boxes has 8 devices" in found["fits-cluster"].message


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ('"all"', "4", "links-join-cluster"),
        ("devices_per_node = 4", "", "missing-setting"),
        ("devices_per_node", "device_per_node", "unknown-key"),
        ("bandwidth = 1.25e9", "bandwidth = -1", "out-of-range"),
        ("latency_s = 30e-6", "", "missing-setting"),
        ("[[links]]", "[[link]]", "unknown-key"),
        ("bf16", "bf61", "unknown-key"),
        ("nodes = 2", "nodes = 2.0", "wrong-type"),
        ("nodes = 2", "links = 2", "toml-syntax"),
        ("nodes = 2", "nodes 2", "toml-syntax"),
    ],
)
def test_a_cluster_file_is_checked_like_a_run_file(
    tmp_path: Path, old: str, new: str, rule: str
) -> None:
    write(tmp_path, CLUSTER.replace(old, new), "boxes.toml")
    run = write(tmp_path, 'extends = "nano"\n[cluster]\nfile = "boxes.toml"')
    assert rule in problems_of(run)


def test_links_are_a_list_of_tables(tmp_path: Path) -> None:
    text = CLUSTER.partition("[[links]]")[0]
    write(tmp_path, "links = 3\n" + text, "boxes.toml")
    run = write(tmp_path, 'extends = "nano"\n[cluster]\nfile = "boxes.toml"')
    assert list(problems_of(run)) == ["wrong-type"]
