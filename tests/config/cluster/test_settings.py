"""Clusters by name and from a file: networks, racks, tiers, and bandwidths in the wrong unit."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.cluster.file import CLUSTER_SETTINGS, build_cluster
from echelon.config.cluster.settings import named_cluster, smallest_cluster
from echelon.config.entries import Entry, flatten
from echelon.config.presets import preset_names, read_preset
from echelon.core.cluster import Cluster, Efficiency
from echelon.core.rulebook import areas
from echelon.core.rules import Rule
from tests.config.cluster.boxes import BOXES, boxes_problems, cluster_of, read_boxes

NO_MULTIPROCESSORS = ("trainium2", "tpu-v5p")


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
        half = peaks.get("fp16", peaks.get("bf16", 0.0))
        assert peaks.get("fp8", 1e30) >= half > peaks.get("fp32", 0.0)
        # A device does 50 to 600 FLOPs in the time in which it reads a byte.
        assert 30 < half / found.device.memory_bandwidth < 650
        assert found.device.efficiency.units > (1 if device in NO_MULTIPROCESSORS else 32)


@pytest.mark.parametrize(
    ("device", "bf16", "fp8"),
    [("3090", 71e12, None), ("4090", 165e12, 330e12), ("5090", 209.5e12, 419e12)],
)
def test_a_consumer_card_has_its_peaks_with_32_bit_sums(
    device: str, bf16: float, fp8: float | None
) -> None:
    cluster = cluster_of(f"2x{device}")
    assert (cluster.device.flops("bf16"), cluster.device.flops("fp16")) == (bf16, bf16)
    assert cluster.device.flops("fp8") == fp8
    # What is sent goes through the host: no card reads the memory of another.
    assert cluster.links[0].efficiency == 0.5


def test_a_name_says_the_network() -> None:
    cluster = cluster_of("1024xa100-80gb+4xhdr")
    assert cluster.name == "1024xa100-80gb+4xhdr"
    assert [(link.name, link.interfaces) for link in cluster.links] == [
        ("NVLink 3 + NVSwitch", 0),
        ("InfiniBand HDR 200 Gb/s", 4),
    ]
    (_, network) = cluster_of("16xh100+roce-100").links
    assert (network.bandwidth, network.interfaces) == (12.5e9, 0)
    assert cluster_of("16xh100+8xndr").links == cluster_of("16xh100").links
    assert len(cluster_of("8xh100+4xndr").links) == 1
    assert smallest_cluster("16xh100+4xndr", 20) == "24xh100+4xndr"


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("8xH100", "8xh100"),
        ("8 x h100", "8xh100"),
        ("8XH100-SXM", "8xh100"),
        ("8xRTX4090", "8xrtx4090"),
        ("8x4090", "8xrtx4090"),
        ("8 GeForce RTX 4090", "8xrtx4090"),
        ("16xA100 80GB+4xHDR", "16xa100-80gb+4xhdr"),
        ("16xh100+RoCE-100", "16xh100+roce-100"),
        ("Laptop", "laptop"),
    ],
)
def test_a_cluster_has_one_name_in_many_spellings(typed: str, name: str) -> None:
    assert cluster_of(typed) == cluster_of(name)
    assert cluster_of(typed).name == name


@pytest.mark.parametrize(
    ("name", "works"),
    [
        ("8xa100", ("8xa100-40gb", "8xa100-80gb", "8xa100-pcie")),
        ("8xV100", ("8xv100-16gb", "8xv100-32gb")),
        ("H100", ("8xh100",)),
        ("0xh100", ("8xh100",)),
    ],
)
def test_a_name_of_several_devices_or_of_no_number_is_none(
    name: str, works: tuple[str, ...]
) -> None:
    found = named_cluster(name, "test")
    assert isinstance(found, list)
    assert [(one.rule, one.suggestions) for one in found] == [("unknown-preset", works)]


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
    assert not works or works in found[0].suggestions


@pytest.mark.parametrize(
    ("count", "degrees"),
    [(4, [4]), (64, [64]), (72, [72]), (128, [64, 128]), (144, [72, 144]), (100, [20, 100])],
)
def test_racks_are_filled_evenly(count: int, degrees: list[int]) -> None:
    assert [link.degree for link in cluster_of(f"{count}xgb200").links] == degrees


@pytest.mark.parametrize("rule", [r for r in areas()["cluster"] if "[[links]]" in r.bad])
def test_examples_of_a_rule(rule: Rule, tmp_path: Path) -> None:
    found = boxes_problems(tmp_path, BOXES + rule.bad)
    assert [problem.rule for problem in found] == [rule.id]
    assert isinstance(read_boxes(tmp_path, BOXES + rule.fixed), Cluster)
