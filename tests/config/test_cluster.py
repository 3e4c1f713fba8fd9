"""Clusters by name and from a file: networks, racks, tiers, and bandwidths in the wrong unit."""

from __future__ import annotations

from dataclasses import replace
from inspect import cleandoc
from pathlib import Path

import pytest

from echelon.config.cluster import named_cluster, read_cluster_file, smallest_cluster
from echelon.config.cluster_devices import known_device
from echelon.config.cluster_file import CLUSTER_SETTINGS, build_cluster
from echelon.config.cluster_toml import cluster_toml
from echelon.config.entries import Entry, flatten
from echelon.config.presets import preset_names, read_preset
from echelon.core.cluster import Cluster, Efficiency
from echelon.core.errors import Problem
from echelon.core.rulebook import areas
from echelon.core.rules import Rule

BOXES = """
name = "two boxes"
nodes = 2
devices_per_node = 4
[device]
name = "card"
memory_bytes = 16_000_000_000
memory_bandwidth = 600e9
"""
LINKS = """
[[links]]
link = "pcie-4"
degree = 4
[[links]]
link = "infiniband-hdr"
degree = "all"
"""


def _cluster(name: str) -> Cluster:
    found = named_cluster(name, "test")
    assert isinstance(found, Cluster), found
    return found


def _read(folder: Path, text: str) -> Cluster | list[Problem]:
    path = folder / "boxes.toml"
    path.write_text(text)
    return read_cluster_file(path, "test")


def _problems(folder: Path, text: str) -> list[Problem]:
    found = _read(folder, text)
    assert isinstance(found, list), found
    return found


@pytest.mark.parametrize("device", preset_names("clusters"))
def test_a_device_has_a_source_and_plausible_numbers(device: str) -> None:
    preset = read_preset("clusters", device)
    assert preset is not None
    found = build_cluster(
        {
            key: Entry(value=value, source="test")
            for key, value in flatten(preset.tables, settings=CLUSTER_SETTINGS)
        },
        "test",
    )
    assert isinstance(found, Cluster)
    assert found.device.efficiency != Efficiency()
    assert found.name == device
    peaks = dict(found.device.peak_flops)
    if found.backend == "nccl":
        assert peaks.get("fp8", 1e30) > peaks["fp16"] > peaks.get("fp32", 0.0)
        # A device does 50 to 600 FLOPs in the time in which it reads a byte.
        assert 30 < peaks["fp16"] / found.device.memory_bandwidth < 650
        assert found.device.efficiency.units > 50


def test_a_name_says_the_network() -> None:
    cluster = _cluster("1024xa100-80gb+4xhdr")
    assert cluster.name == "1024xa100-80gb+4xhdr"
    assert [(link.name, link.interfaces) for link in cluster.links] == [
        ("NVLink 3 + NVSwitch", 0),
        ("InfiniBand HDR 200 Gb/s", 4),
    ]
    (_, network) = _cluster("16xh100+roce-100").links
    assert (network.bandwidth, network.interfaces) == (12.5e9, 0)
    assert _cluster("16xh100+8xndr").links == _cluster("16xh100").links
    assert len(_cluster("8xh100+4xndr").links) == 1
    assert smallest_cluster("16xh100+4xndr", 20) == "24xh100+4xndr"


@pytest.mark.parametrize(
    ("name", "rule", "works"),
    [
        ("16xh100+ndrr", "unknown-preset", "16xh100+ndr"),
        ("16xh100+4xnd", "unknown-preset", "16xh100+4xndr"),
        ("16xh1000+ndr", "unknown-preset", "16xh100"),
        ("16xh1oo", "unknown-preset", "16xh100"),
        ("12xh100+4xhdr", "whole-nodes", "16xh100+4xhdr"),
        ("3xmi250x", "tiers-divide-cluster", ""),
    ],
)
def test_a_name_that_is_none_is_refused(name: str, rule: str, works: str) -> None:
    found = named_cluster(name, "test")
    assert isinstance(found, list)
    assert [problem.rule for problem in found] == [rule]
    assert not works or works in found[0].works


@pytest.mark.parametrize(
    ("count", "degrees"),
    [(4, [4]), (64, [64]), (72, [72]), (128, [64, 128]), (144, [72, 144]), (100, [20, 100])],
)
def test_racks_are_filled_evenly(count: int, degrees: list[int]) -> None:
    assert [link.degree for link in _cluster(f"{count}xgb200").links] == degrees


def test_a_file_names_links_and_overrides_them(tmp_path: Path) -> None:
    text = BOXES + LINKS + "interfaces = 2\nefficiency = 0.5\n"
    text += "[device.efficiency]\nmatmul = 0.5\nunits = 40\n[device.peak_flops]\nfp8 = 2e14\n"
    found = _read(tmp_path, text)
    assert isinstance(found, Cluster)
    inner, outer = found.links
    assert (inner.name, inner.bandwidth) == ("PCIe 4 x16", 31.508e9)
    assert (outer.bandwidth, outer.interfaces, outer.efficiency) == (25e9, 2, 0.5)
    assert (found.device.efficiency.matmul, found.device.efficiency.units) == (0.5, 40)
    assert found.device.flops("fp8") == 2e14


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ('"pcie-4"', '"pcie-44"', "unknown-preset"),
        ("degree = 4", "degree = 3", "tiers-divide-cluster"),
        ("nodes = 2", "nodes = 3\n[x]", "unknown-key"),
        ("degree = 4", "degree = 4\ninterfaces = 2", "interfaces-between-nodes"),
        ("degree = 4", "degree = 4\nefficiency = 1.2", "out-of-range"),
        ('link = "pcie-4"', "", "missing-setting"),
        ('degree = "all"', "degree = 4", "links-join-cluster"),
    ],
)
def test_tiers_are_checked(tmp_path: Path, old: str, new: str, rule: str) -> None:
    text = (BOXES + LINKS).replace(old, new)
    assert rule in [problem.rule for problem in _problems(tmp_path, text)]


def test_a_tier_does_not_cut_nodes(tmp_path: Path) -> None:
    text = BOXES.replace("nodes = 2", "nodes = 3") + LINKS.replace("degree = 4", "degree = 6")
    (problem,) = _problems(tmp_path, text)
    assert problem.rule == "tiers-divide-cluster"
    assert "neither 6 % 4 nor 4 % 6 is 0" in problem.message
    assert problem.works == ("degree = 2", "degree = 4")


@pytest.mark.parametrize(
    ("name", "bandwidth", "says", "works"),
    [
        ("InfiniBand NDR", "400e9", "400 Gb/s each way = 50 GB/s", "bandwidth = 50e9"),
        ("IB 400 Gb/s", "400e9", "400 Gb/s = 50 GB/s", "bandwidth = 50e9"),
        ("the network", "400e9", "fastest interface", "bandwidth = 50e9"),
        ("RoCE 100", "100e9", "100 Gb/s each way = 12.5 GB/s", "bandwidth = 12.5e9"),
        ("the network", "400", "bytes per second", "bandwidth = 50e9"),
        ("the network", "400e9\ninterfaces = 4", "fastest interface", "sure = true"),
    ],
)
def test_a_bandwidth_in_bits_is_questioned(
    tmp_path: Path, name: str, bandwidth: str, says: str, works: str
) -> None:
    link = f'[[links]]\nname = "{name}"\nlatency_s = 1e-6\nbandwidth = {bandwidth}\n'
    (problem,) = _problems(tmp_path, BOXES + link)
    assert problem.rule == "link-bandwidth-in-bits"
    assert says in problem.message
    assert works in problem.works
    meant = "sure = true" if works.startswith("sure") else works
    fixed = f"{link}{meant}\n" if meant == "sure = true" else f"{link.partition('band')[0]}{meant}"
    assert isinstance(_read(tmp_path, BOXES + fixed), Cluster)


def test_both_directions_and_several_interfaces(tmp_path: Path) -> None:
    (problem,) = _problems(
        tmp_path, BOXES + LINKS.replace('"pcie-4"', '"nvlink-4"\nbandwidth = 900e9')
    )
    assert "900 GB/s both ways = 450 GB/s each way" in problem.message
    eight_each = LINKS + "bandwidth = 200e9\ninterfaces = 32\n"
    assert isinstance(_read(tmp_path, BOXES + eight_each), Cluster)


def test_the_link_of_a_device_needs_no_generation(tmp_path: Path) -> None:
    text = BOXES.replace('"card"', '"H100"').replace("16_000_000_000", "80_000_000_000")
    text = text.replace("600e9", "3.35e12") + LINKS.replace(
        'link = "pcie-4"', 'name = "NVLink"\nlatency_s = 3e-6\nbandwidth = 900e9'
    )
    (problem,) = _problems(tmp_path, text)
    assert problem.rule == "link-bandwidth-in-bits"
    assert "that of H100 carries 900 GB/s both ways = 450 GB/s each way" in problem.message
    assert problem.works == ("bandwidth = 450e9", "sure = true")
    assert isinstance(_read(tmp_path, text.replace("900e9", "450e9")), Cluster)
    assert isinstance(_read(tmp_path, text.replace('"H100"', '"other"')), Cluster)


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
    assert isinstance(_read(tmp_path, right), Cluster)
    assert old in right
    text = right.replace(old, new, 1)
    (problem,) = _problems(tmp_path, text)
    assert problem.rule == "cluster-units"
    assert says in problem.message
    assert problem.works == ((works,) if works else ()) + ("sure = true in [device]",)
    meant = text.replace("[device]\n", "[device]\nsure = true\n")
    assert isinstance(_read(tmp_path, meant), Cluster)


@pytest.mark.parametrize(
    ("name", "latency", "works"),
    [
        ("InfiniBand NDR", "8", "latency_s = 8e-06"),
        ("InfiniBand NDR", "8e-3", "latency_s = 8e-06"),
        ("InfiniBand NDR", "8000", "latency_s = 8e-06"),
        ("backplane", "30", "latency_s = 3e-05"),
        ("backplane", "3e-11", ""),
    ],
)
def test_a_latency_in_another_unit_is_questioned(
    tmp_path: Path, name: str, latency: str, works: str
) -> None:
    text = f'{BOXES}[[links]]\nname = "{name}"\nbandwidth = 25e9\nlatency_s = {latency}\n'
    (problem,) = _problems(tmp_path, text)
    assert problem.rule == "cluster-units"
    assert problem.works == ((works,) if works else ()) + ("sure = true",)
    assert isinstance(_read(tmp_path, text + "sure = true\n"), Cluster)
    assert isinstance(_read(tmp_path, text.replace(latency, "1e-5", 1)), Cluster)


def test_a_processor_is_held_to_what_processors_do(tmp_path: Path) -> None:
    text = BOXES.replace("nodes = 2", 'backend = "gloo"').replace("600e9", "10")
    (problem,) = _problems(tmp_path, text + '[[links]]\nlink = "loopback"\n')
    assert problem.works[0] == "memory_bandwidth = 1e10"


def test_several_devices_without_links_are_told_how_to_write_them(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, BOXES)
    assert problem.rule == "links-join-cluster"
    assert "2 x 4 = 8 devices and no links" in problem.message
    line = problem.works[0].removesuffix(" above [device]")
    found = _read(tmp_path, BOXES.replace("[device]", f"{line}\n[device]"))
    assert isinstance(found, Cluster)
    assert [(link.name, link.degree) for link in found.links] == [
        ("NVLink 4 + NVSwitch", 4),
        ("InfiniBand NDR 400 Gb/s", 8),
    ]
    one = BOXES.replace("nodes = 2", "").replace("= 4", "= 1")
    assert isinstance(_read(tmp_path, one), Cluster)


@pytest.mark.parametrize("name", ["8xh100", "4xcpu", "16xcpu-core", "128xgb200"])
def test_a_written_cluster_is_read_back_as_the_same(tmp_path: Path, name: str) -> None:
    cluster = _cluster(name)
    third = replace(cluster.device.efficiency, matmul=1 / 3, launch_s=0.1 + 0.2, half_depth=1e2 / 7)
    device = replace(
        cluster.device,
        memory_bandwidth=cluster.device.memory_bandwidth * (1 + 2**-52),
        peak_flops=(("fp32", 1e16), ("bf16", 2e14 / 3)),
        efficiency=third,
    )
    links = tuple(
        replace(link, bandwidth=link.bandwidth / 3, latency_s=1e-5 / 7) for link in cluster.links
    )
    cluster = replace(cluster, device=device, links=links, trainer=(("host_s", 1e-6 / 3),))
    assert _read(tmp_path, cluster_toml(cluster)) == cluster
    untouched = _cluster(name)
    assert _read(tmp_path, cluster_toml(untouched)) == untouched
    assert "sure" not in cluster_toml(_cluster("8xh100"))


@pytest.mark.parametrize("rule", [r for r in areas()["cluster"] if "[[links]]" in r.bad])
def test_examples_of_a_rule(rule: Rule, tmp_path: Path) -> None:
    found = _problems(tmp_path, BOXES + cleandoc(rule.bad))
    assert [problem.rule for problem in found] == [rule.id]
    assert isinstance(_read(tmp_path, BOXES + cleandoc(rule.fixed)), Cluster)


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
        ("Quadro FX", 1, None),
    ],
)
def test_the_name_of_a_driver_is_a_device(name: str, gigabytes: int, preset: str | None) -> None:
    found = known_device(name, gigabytes * 10**9)
    assert (found.name if found else None) == preset
