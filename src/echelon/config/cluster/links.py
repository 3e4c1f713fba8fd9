# SPDX-License-Identifier: Apache-2.0
"""The catalogue of links, `presets/links.toml`: rates as vendors print them -> bytes/s each way.

A rate is a value with a unit (Gb/s or GB/s), a direction and a source; this file is the only place
that turns bits into bytes, and the sum of both directions into one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, cast

BYTES_PER_S: Mapping[str, float] = {"Gb/s": 1e9 / 8, "GB/s": 1e9}
DIRECTIONS: Mapping[str, float] = {"each way": 1.0, "both ways": 0.5}
UNITS: Mapping[str, float] = {"us": 1e-6, "share": 1.0, "MB": 1e6}
LINK_CLASSES = ("device", "host", "network", "memory")
MEASURES: Mapping[str, str] = {"latency": "us", "efficiency": "share", "half_message": "MB"}
"""The numbers of a link beside its rates, and the unit in which the catalogue has each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Give one number that a vendor prints: value, unit, direction, and who says so."""

    value: float
    unit: str
    direction: str
    source: str

    @property
    def bytes_each_way(self) -> float:
        """Return the rate in bytes per second in one direction."""
        return self.value * BYTES_PER_S[self.unit] * DIRECTIONS[self.direction]

    def __str__(self) -> str:
        """Return the rate as it is printed: ``400 Gb/s each way``."""
        return f"{self.value:g} {self.unit} {self.direction}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPreset:
    """Give one link of the catalogue."""

    key: str
    """Its key in the catalogue."""
    name: str
    """What it is called in reports."""
    kind: str
    """device (between devices of a node), host (PCIe), network (between nodes) or memory."""
    rates: tuple[Rate, ...]
    """What sources say of its bandwidth; they agree."""
    latency_s: float
    """Seconds of one message."""
    efficiency: float
    """Part of the bandwidth that long messages reach."""
    half_bytes: float
    """Bytes of a message that reaches half of that."""
    words: tuple[str, ...]
    """Words that name it as the network of a cluster (16xa100-80gb+hdr)."""
    known_as: tuple[str, ...]
    """Names that files give it."""

    @property
    def bandwidth(self) -> float:
        """Return bytes per second in one direction."""
        return self.rates[0].bytes_each_way

    def arithmetic(self) -> str:
        """Return how the printed rate becomes bytes each way: ``400 Gb/s = 50 GB/s``."""
        # Bits tell most to whoever mixed up the units, then the sum of both directions.
        printed = sorted(self.rates, key=lambda r: (r.unit != "Gb/s", r.direction != "both ways"))
        return f"{printed[0]} = {self.bandwidth / 1e9:g} GB/s each way"


@cache
def link_presets() -> Mapping[str, LinkPreset]:
    """Return the links of the catalogue by key."""
    text = (files("echelon.config.presets") / "links.toml").read_text("utf-8")
    return {key: read_link(key, table) for key, table in tomllib.loads(text).items()}


def network_suffixes() -> Mapping[str, LinkPreset]:
    """Return the links that a cluster's name can end in (16xa100-80gb+hdr), by word."""
    return {word: link for link in link_presets().values() for word in link.words}


def link_preset_from_name(name: str) -> LinkPreset | None:
    """Return the link that a name speaks of: ``NDR``, ``IB HDR 200Gb/s``, ``NVLink gen 4``."""
    squeezed, words = _squeeze(name), set(re.findall(r"[a-z0-9-]+", name.lower()))
    found: list[tuple[int, LinkPreset]] = []
    for link in link_presets().values():
        spelt = (link.name, link.key, *link.known_as)
        fits = [len(_squeeze(one)) for one in spelt if _squeeze(one) in squeezed]
        fits += [len(_squeeze(word)) for word in link.words if word in words]
        found += [(max(fits), link)] if fits else []
    return max(found, key=lambda pair: pair[0])[1] if found else None


def read_link(key: str, table: Mapping[str, Any]) -> LinkPreset:
    """Return one entry; ValueError where a number lacks its unit, direction or source."""
    faults = list(_entry_faults(key, table))
    if faults:
        raise ValueError("; ".join(faults))
    numbers = {name: table[name]["value"] * UNITS[unit] for name, unit in MEASURES.items()}
    return LinkPreset(
        key=key,
        name=table["name"],
        kind=table["kind"],
        rates=tuple(Rate(**rate) for rate in table["rates"]),
        latency_s=numbers["latency"],
        efficiency=numbers["efficiency"],
        half_bytes=numbers["half_message"],
        words=tuple(table.get("words", ())),
        known_as=tuple(table.get("known_as", ())),
    )


def _entry_faults(key: str, table: Mapping[str, Any]) -> Iterator[str]:
    unknown = set(table) - {"name", "kind", "rates", "words", "known_as", *MEASURES}
    if unknown:
        yield f"{key} has {', '.join(sorted(unknown))}, which nothing reads"
    if table.get("kind") not in LINK_CLASSES:
        yield f"{key} is of no kind ({', '.join(LINK_CLASSES)})"
    if not table.get("name") or not table.get("rates"):
        yield f"{key} has no name or no rates"
    for rate in cast("list[Mapping[str, Any]]", table.get("rates", [])):
        yield from _number_faults(f"{key}.rates", rate, tuple(BYTES_PER_S))
        if rate.get("direction") not in DIRECTIONS:
            yield f"{key}.rates: {rate.get('value')} is {' or '.join(DIRECTIONS)}, but which?"
    for name, unit in MEASURES.items():
        yield from _number_faults(f"{key}.{name}", table.get(name, {}), (unit,))


def _number_faults(where: str, number: Mapping[str, Any], units: tuple[str, ...]) -> Iterator[str]:
    value = number.get("value")
    if not isinstance(value, int | float) or value < 0:
        yield f"{where} has no value"
    if number.get("unit") not in units:
        yield f"{where}: {value} is in no unit ({', '.join(units)})"
    if not str(number.get("source", "")).strip():
        yield f"{where}: {value} has no source"


@lru_cache(maxsize=1024)
def _squeeze(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
