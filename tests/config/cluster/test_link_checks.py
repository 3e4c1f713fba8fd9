"""Links whose numbers look like another unit, and tiers that do not fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.cluster import Cluster
from tests.config.cluster.boxes import BOXES, LINKS, boxes_problems, read_boxes


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
    assert rule in [problem.rule for problem in boxes_problems(tmp_path, text)]


def test_a_tier_does_not_cut_nodes(tmp_path: Path) -> None:
    text = BOXES.replace("nodes = 2", "nodes = 3") + LINKS.replace("degree = 4", "degree = 6")
    (problem,) = boxes_problems(tmp_path, text)
    assert problem.rule == "tiers-divide-cluster"
    assert "neither 6 % 4 nor 4 % 6 is 0" in problem.message
    assert problem.suggestions == ("degree = 2", "degree = 4")


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
    (problem,) = boxes_problems(tmp_path, BOXES + link)
    assert problem.rule == "link-bandwidth-in-bits"
    assert says in problem.message
    assert works in problem.suggestions
    meant = "sure = true" if works.startswith("sure") else works
    fixed = f"{link}{meant}\n" if meant == "sure = true" else f"{link.partition('band')[0]}{meant}"
    assert isinstance(read_boxes(tmp_path, BOXES + fixed), Cluster)


def test_both_directions_and_several_interfaces(tmp_path: Path) -> None:
    (problem,) = boxes_problems(
        tmp_path, BOXES + LINKS.replace('"pcie-4"', '"nvlink-4"\nbandwidth = 900e9')
    )
    assert "900 GB/s both ways = 450 GB/s each way" in problem.message
    eight_each = LINKS + "bandwidth = 200e9\ninterfaces = 32\n"
    assert isinstance(read_boxes(tmp_path, BOXES + eight_each), Cluster)


def test_the_link_of_a_device_needs_no_generation(tmp_path: Path) -> None:
    text = BOXES.replace('"card"', '"H100"').replace("16_000_000_000", "80_000_000_000")
    text = text.replace("600e9", "3.35e12") + LINKS.replace(
        'link = "pcie-4"', 'name = "NVLink"\nlatency_s = 3e-6\nbandwidth = 900e9'
    )
    (problem,) = boxes_problems(tmp_path, text)
    assert problem.rule == "link-bandwidth-in-bits"
    assert "that of H100 carries 900 GB/s both ways = 450 GB/s each way" in problem.message
    assert problem.suggestions == ("bandwidth = 450e9", "sure = true")
    assert isinstance(read_boxes(tmp_path, text.replace("900e9", "450e9")), Cluster)
    assert isinstance(read_boxes(tmp_path, text.replace('"H100"', '"other"')), Cluster)


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
    (problem,) = boxes_problems(tmp_path, text)
    assert problem.rule == "cluster-units"
    assert problem.suggestions == ((works,) if works else ()) + ("sure = true",)
    assert isinstance(read_boxes(tmp_path, text + "sure = true\n"), Cluster)
    assert isinstance(read_boxes(tmp_path, text.replace(latency, "1e-5", 1)), Cluster)
