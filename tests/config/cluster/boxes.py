"""Two boxes of four devices, for tests of cluster files: read, or what is wrong with them."""

from __future__ import annotations

from pathlib import Path

from echelon.config.cluster.settings import named_cluster, read_cluster_file
from echelon.core.cluster import Cluster
from echelon.core.errors import Problem

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


def cluster_of(name: str) -> Cluster:
    found = named_cluster(name, "test")
    assert isinstance(found, Cluster), found
    return found


def read_boxes(folder: Path, text: str) -> Cluster | list[Problem]:
    path = folder / "boxes.toml"
    path.write_text(text)
    return read_cluster_file(path, "test")


def boxes_problems(folder: Path, text: str) -> list[Problem]:
    found = read_boxes(folder, text)
    assert isinstance(found, list), found
    return found
