"""A cluster in TOML: links of the catalogue, own numbers over them, written and read back."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config.cluster.file import cluster_toml
from echelon.config.load import load_job
from echelon.core.cluster import NOT_MEASURED, Cluster
from tests.config.cluster.boxes import BOXES, LINKS, boxes_problems, cluster_of, read_boxes

ROOT = Path(__file__).parents[3]


def test_a_file_names_links_and_overrides_them(tmp_path: Path) -> None:
    text = BOXES + LINKS + "interfaces = 2\nefficiency = 0.5\n"
    text += "[device.efficiency]\nmatmul = 0.5\nunits = 40\n[device.peak_flops]\nfp8 = 2e14\n"
    found = read_boxes(tmp_path, text)
    assert isinstance(found, Cluster)
    inner, outer = found.links
    assert (inner.name, inner.bandwidth) == ("PCIe 4 x16", 31.508e9)
    assert (outer.bandwidth, outer.interfaces, outer.efficiency) == (25e9, 2, 0.5)
    assert (found.device.efficiency.matmul, found.device.efficiency.units) == (0.5, 40)
    assert found.device.flops("fp8") == 2e14


def test_several_devices_without_links_are_told_how_to_write_them(tmp_path: Path) -> None:
    (problem,) = boxes_problems(tmp_path, BOXES)
    assert problem.rule == "links-join-cluster"
    assert "2 x 4 = 8 devices and no links" in problem.message
    line = problem.suggestions[0].removesuffix(" above [device]")
    found = read_boxes(tmp_path, BOXES.replace("[device]", f"{line}\n[device]"))
    assert isinstance(found, Cluster)
    assert [(link.name, link.degree) for link in found.links] == [
        ("NVLink 4 + NVSwitch", 4),
        ("InfiniBand NDR 400 Gb/s", 8),
    ]
    one = BOXES.replace("nodes = 2", "").replace("= 4", "= 1")
    assert isinstance(read_boxes(tmp_path, one), Cluster)


@pytest.mark.parametrize("name", ["8xh100", "4xcpu", "16xcpu-core", "128xgb200"])
def test_a_written_cluster_is_read_back_as_the_same(tmp_path: Path, name: str) -> None:
    cluster = cluster_of(name)
    third = replace(cluster.device.efficiency, matmul=1 / 3, launch_s=0.1 + 0.2, half_depth=1e2 / 7)
    device = replace(
        cluster.device,
        memory_bandwidth=cluster.device.memory_bandwidth * (1 + 2**-52),
        peak_flops=(("fp32", 1e16), ("bf16", 2e14 / 3)),
        efficiency=third,
        measured=NOT_MEASURED,
    )
    links = tuple(
        replace(link, bandwidth=link.bandwidth / 3, latency_s=1e-5 / 7) for link in cluster.links
    )
    cluster = replace(cluster, device=device, links=links, trainer=(("host_s", 1e-6 / 3),))
    assert read_boxes(tmp_path, cluster_toml(cluster)) == cluster
    untouched = cluster_of(name)
    assert read_boxes(tmp_path, cluster_toml(untouched)) == untouched
    assert "sure =" not in cluster_toml(cluster_of("8xh100"))


def test_the_example_of_the_guide_is_a_cluster(tmp_path: Path) -> None:
    guide = (ROOT / "docs/guides/plan.md").read_text(encoding="utf-8")
    (example,) = (
        block
        for block in re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)
        if "devices_per_node" in block
    )
    path = tmp_path / "ours.toml"
    path.write_text(example)
    cluster = load_job("nano", [f"cluster.file={path}"]).plan.cluster
    assert cluster.num_devices == 32
    assert cluster.device.memory_bytes == round(23.64 * 2**30)
    assert cluster.device.flops("bf16") == 165e12
    assert [link.bandwidth for link in cluster.links] == [31.508e9, 12.5e9]
    assert cluster.device.efficiency.launch_s == pytest.approx(5e-6)
