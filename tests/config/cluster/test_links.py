"""The catalogue of links: units, directions and sources of every number, and how names are read."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest

from echelon.config.cluster.links import (
    Rate,
    link_preset_from_name,
    link_presets,
    network_suffixes,
    read_link,
)

TEXT = (files("echelon.config") / "presets" / "links.toml").read_text("utf-8")


@pytest.mark.parametrize("key", link_presets())
def test_the_rates_of_a_link_agree(key: str) -> None:
    link = link_presets()[key]
    assert all(rate.source for rate in link.rates)
    for rate in link.rates:
        assert rate.bytes_each_way == pytest.approx(link.bandwidth, rel=1e-3), rate
    assert 0 < link.efficiency <= 1
    assert link.latency_s > 0
    found = link_preset_from_name(link.name)
    assert found is not None
    assert found.key == key


def _without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(table: dict[str, Any]) -> None:
        for name in path[:-1]:
            table = table[name][0] if isinstance(table[name], list) else table[name]
        del table[path[-1]]

    return change


@pytest.mark.system("S45")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("rates", "unit"), "400 is in no unit"),
        (_without("rates", "direction"), "400 is each way or both ways, but which"),
        (_without("rates", "source"), "400 has no source"),
        (_without("rates", "value"), "rates has no value"),
        (_without("rates"), "no rates"),
        (_without("latency", "unit"), "latency: 8 is in no unit"),
        (_without("latency", "source"), "latency: 8 has no source"),
        (_without("efficiency"), "efficiency has no value"),
        (_without("half_message", "source"), "half_message: 4 has no source"),
        (_without("kind"), "of no kind"),
        (lambda table: table.update(speed=3), "speed, which nothing reads"),
    ],
)
def test_a_number_without_its_label_is_rejected(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    table = tomllib.loads(TEXT)["infiniband-ndr"]
    assert read_link("infiniband-ndr", table).bandwidth == 50e9
    change(table)
    with pytest.raises(ValueError, match=message):
        read_link("infiniband-ndr", table)


@pytest.mark.system("S45")
def test_bits_and_directions_become_bytes_each_way() -> None:
    def each_way(value: float, unit: str, direction: str) -> float:
        return Rate(value=value, unit=unit, direction=direction, source="x").bytes_each_way

    assert each_way(400, "Gb/s", "each way") == 50e9
    assert each_way(900, "GB/s", "both ways") == 450e9
    assert link_presets()["infiniband-ndr"].arithmetic() == "400 Gb/s each way = 50 GB/s each way"
    assert link_presets()["nvlink-4"].arithmetic() == "900 GB/s both ways = 450 GB/s each way"


def test_published_comparisons_of_links() -> None:
    """NVLink 3 is 600 GB/s both ways and 12 x HDR one way; NVLink 5 is 14 x PCIe 5."""
    links = link_presets()
    assert [links[f"nvlink-{n}"].bandwidth / 1e9 for n in (3, 4, 5)] == [300, 450, 900]
    networks = [links[f"infiniband-{n}"].bandwidth / 1e9 for n in ("hdr100", "hdr", "ndr", "xdr")]
    assert networks == [12.5, 25, 50, 100]
    assert links["nvlink-3"].bandwidth / links["infiniband-hdr"].bandwidth == 12
    assert links["nvlink-4"].bandwidth / links["infiniband-ndr"].bandwidth == 9
    assert links["nvlink-5"].bandwidth / 64e9 == pytest.approx(14.06, rel=0.001)
    assert links["pcie-5"].bandwidth == pytest.approx(64e9, rel=0.02)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NDR", "infiniband-ndr"),
        ("IB HDR 200Gb/s", "infiniband-hdr"),
        ("InfiniBand HDR100", "infiniband-hdr100"),
        ("NVLink gen 4", "nvlink-4"),
        ("PCIe 4 x16", "pcie-4"),
        ("RoCE 400 Gb/s", "roce-400"),
        ("Ethernet", None),
        ("backplane", None),
    ],
)
def test_a_name_speaks_of_a_link(name: str, key: str | None) -> None:
    found = link_preset_from_name(name)
    assert (found.key if found else None) == key


def test_every_network_has_one_word() -> None:
    words = [word for link in link_presets().values() for word in link.words]
    assert len(set(words)) == len(words) == len(network_suffixes())
    assert all(link.kind == "network" for link in network_suffixes().values())
