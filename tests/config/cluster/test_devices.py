"""Devices by the names of their drivers, and numbers that look like another unit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from echelon.config.cluster.devices import common_devices, device_preset_from_name
from echelon.config.cluster.file import cluster_toml
from echelon.config.presets import preset_names
from echelon.core.cluster import Cluster
from tests.config.cluster.boxes import BOXES, LINKS, boxes_problems, cluster_of, read_boxes


@pytest.mark.parametrize(
    ("device", "old", "new", "says", "works"),
    [
        ("card", "600e9", "600", "looks like GB/s", "memory_bandwidth = 6e11"),
        ("card", "600e9", "3.35", "looks like TB/s", "memory_bandwidth = 3.35e12"),
        ("card", "16_000_000_000", "80", "looks like GB", "memory_bytes = 80000000000"),
        ("card", "16_000_000_000", "81920", "looks like MiB", "memory_bytes = 85899345920"),
        ("H100", "16_000_000_000", "640_000_000_000", "bits", "memory_bytes = 80000000000"),
        ("H100", "600e9", "26.8e12", "bits per second", "memory_bandwidth = 3.35e12"),
        ("H100", "600e9", "3.35e9", "H100 SXM 80 GB has 3.35e12", ""),
        ("H100", "fp32 = 6e13", "bf16 = 989", "TFLOP/s", "bf16 = 9.89e14"),
        ("H100", "fp32 = 6e13", "bf16 = 1979e12", "sparse", "bf16 = 9.895e14"),
        ("H100", "fp32 = 6e13", "bf16 = 989e9", "1e9 for 1e12", "bf16 = 9.89e14"),
        ("card", "fp32 = 6e13", "bf16 = 312", "TFLOP/s", "bf16 = 3.12e14"),
        ("card", "fp32 = 6e13", "bf16 = 0.989", "PFLOP/s", "bf16 = 9.89e14"),
        ("card", "launch_s = 5e-6", "launch_s = 5", "microseconds", "launch_s = 5e-06"),
    ],
)
def test_a_number_of_a_device_in_another_unit_is_questioned(
    tmp_path: Path, device: str, old: str, new: str, says: str, works: str
) -> None:
    right = BOXES.replace('"card"', f'"{device}"')
    if device == "H100":
        right = right.replace("16_000", "80_000").replace("600e9", "3.35e12")
        old = {"16_000_000_000": "80_000_000_000", "600e9": "3.35e12"}.get(old, old)
    right += "[device.peak_flops]\nfp32 = 6e13\n[device.efficiency]\nlaunch_s = 5e-6\n" + LINKS
    assert isinstance(read_boxes(tmp_path, right), Cluster)
    assert old in right
    text = right.replace(old, new, 1)
    (problem,) = boxes_problems(tmp_path, text)
    assert problem.rule == "cluster-units"
    assert says in problem.message
    assert problem.suggestions == ((works,) if works else ()) + ("sure = true in [device]",)
    meant = text.replace("[device]\n", "[device]\nsure = true\n")
    assert isinstance(read_boxes(tmp_path, meant), Cluster)


@pytest.mark.parametrize("name", ["8xh100", "16xh200+hdr", "8xgh200", "8xh800"])
def test_an_efficiency_that_was_changed_is_refused_beside_measured_kernels(
    tmp_path: Path, name: str
) -> None:
    """What a preset prints is right; a number of one's own needs a device without measurements."""
    printed = cluster_toml(cluster_of(name))
    assert 'measured = "hopper"' in printed
    assert read_boxes(tmp_path, printed) == cluster_of(name)
    changed = re.sub(r"(?m)^matmul = .*$", "matmul = 0.8", printed)
    (problem,) = boxes_problems(tmp_path, changed)
    assert problem.rule == "measured-or-efficiency"
    assert problem.key == "device.efficiency.matmul"
    assert 'device.efficiency.matmul = 0.8, but device.measured = "hopper"' in problem.message
    usual = cluster_of(name).device.efficiency.matmul
    assert any(f"matmul = {usual:g}," in one for one in problem.suggestions)
    ours = read_boxes(tmp_path, changed.replace('measured = "hopper"\n', ""))
    assert isinstance(ours, Cluster)
    assert ours.device.efficiency.matmul == 0.8
    # A number that holds beside measured kernels, and a file without any.
    launched = re.sub(r"(?m)^launch_s = .*$", "launch_s = 9e-6", printed)
    slower = re.sub(r"(?m)^memory = .*$", "memory = 0.3", printed)
    faster = re.sub(r"(?m)^memory = .*$", "memory = 0.99", printed)
    bare = re.sub(r"(?s)\[device.efficiency\].*?\n\n", "", printed)
    for text in (launched, slower, bare):
        assert isinstance(read_boxes(tmp_path, text), Cluster)
    assert [one.key for one in boxes_problems(tmp_path, faster)] == ["device.efficiency.memory"]


def test_an_unknown_device_with_measured_kernels_has_no_efficiency_of_its_own(
    tmp_path: Path,
) -> None:
    text = BOXES + 'measured = "hopper"\n[device.efficiency]\nmatmul = 0.6\ntile = 64\n' + LINKS
    (problem,) = boxes_problems(tmp_path, text)
    assert (problem.rule, problem.key) == ("measured-or-efficiency", "device.efficiency.matmul")


def test_a_processor_is_held_to_what_processors_do(tmp_path: Path) -> None:
    text = BOXES.replace("nodes = 2", 'backend = "gloo"').replace("600e9", "10")
    (problem,) = boxes_problems(tmp_path, text + '[[links]]\nlink = "loopback"\n')
    assert problem.suggestions[0] == "memory_bandwidth = 1e10"


@pytest.mark.parametrize(
    ("name", "gigabytes", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", 85, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 42, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 85, "a100-pcie"),
        ("NVIDIA H100 80GB HBM3", 85, "h100"),
        ("NVIDIA H200", 150, "h200"),
        ("NVIDIA H20", 102, "h20"),
        ("NVIDIA GB200", 198, "gb200"),
        ("Tesla V100-SXM2-16GB", 17, "v100-16gb"),
        ("NVIDIA GeForce RTX 4090", 25, "rtx4090"),
        ("AMD Instinct MI300X", 206, "mi300x"),
        ("NVIDIA L40S", 48, "l40s"),
        ("NVIDIA L40", 48, None),
        ("NVIDIA L4", 24, "l4"),
        ("Tesla T4", 16, "t4"),
        ("NVIDIA A10G", 24, "a10g"),
        ("NVIDIA A10", 24, None),
        ("NVIDIA RTX A6000", 51, "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", 51, "rtx6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 102, "rtx-pro-6000"),
        ("NVIDIA GH200 480GB", 102, "gh200"),
        ("NVIDIA GeForce RTX 3090", 25, "rtx3090"),
        ("Quadro FX", 1, None),
    ],
)
def test_the_name_of_a_driver_is_a_device(name: str, gigabytes: int, preset: str | None) -> None:
    found = device_preset_from_name(name, gigabytes * 10**9)
    assert (found.name if found else None) == preset


def test_common_devices_are_presets() -> None:
    assert set(common_devices()) <= set(preset_names("clusters"))
    assert common_devices()[0] == "h100"
