"""What a table says of its links -> bytes/s of one device, each way, and interfaces of a node.

A number is of the node ("1600Gb/s per node", "4x100Gb/s per node"), of one device ("400Gb/s per
GPU"), or of one interface ("8x HDR IB 200Gb/s"). "b" are bits, "B" bytes. A link inside of a node
is printed as the sum of both ways: NVLink's 600 GB/s are 300 each way.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from echelon.config.cluster.links import LinkPreset, link_preset_from_name

_RATE = re.compile(
    r"(\d+(?:\.\d+)?)\s*(T|G|M)(?:b(?:it)?s?\s*/\s*s(?:ec)?|bps|(B(?:yte)?s?\s*/\s*s(?:ec)?|Bps))"
)
_SHORT = re.compile(r"(\d+)\s*G(?:bE|BE|E|b)?\b")
_TIMES = re.compile(r"(\d+)\s*(?:x|X|\*)\s*(?=[\dA-Za-z(])")
_SCALE = {"T": 1e12, "G": 1e9, "M": 1e6}
WITHOUT_NETWORK = ("single node", "single-node", "none", "1 node")
"""What stands in the place of a network where there is none."""
NODE_ABOVE = 120e9
"""A network rate above this, of nothing named, is a node's and not an interface's (960 Gb/s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Give what one device gets of the network: bytes/s each way; interfaces where counted."""

    bandwidth: float
    interfaces: float
    kind: LinkPreset | None
    guess: str = ""


def network_of(text: str, per_node: float) -> Network | None:
    """Return the network between nodes of `per_node` devices, or None where the text names none."""
    bare = re.sub(r"\([^)]*\)", " ", text)
    kind = network_kind(text)
    for part in (bare, text):
        rate = rate_of(part)
        if rate is not None:
            return _network(part, rate, kind, per_node)
    if kind is None:
        return None
    times = _TIMES.search(bare)
    if times:
        count = float(times[1])
        return Network(bandwidth=kind.bandwidth * count / per_node, interfaces=count, kind=kind)
    return Network(
        bandwidth=kind.bandwidth, interfaces=0.0, kind=kind, guess="an interface for each device"
    )


def _network(text: str, rate: float, kind: LinkPreset | None, per_node: float) -> Network:
    times = _TIMES.search(text)
    count = float(times[1]) if times else 0.0
    if re.search(r"per[\s-]*(gpu|device|rank|accelerator|card)|/\s*gpu", text, re.IGNORECASE):
        return Network(bandwidth=rate, interfaces=count, kind=kind)
    if count:
        return Network(bandwidth=count * rate / per_node, interfaces=count, kind=kind)
    if re.search(r"per[\s-]*(node|host|server)|/\s*node|node-node", text, re.IGNORECASE):
        return Network(bandwidth=rate / per_node, interfaces=0.0, kind=kind)
    if rate > NODE_ABOVE:
        guess = "so much is a node's"
        return Network(bandwidth=rate / per_node, interfaces=0.0, kind=kind, guess=guess)
    if kind is not None and kind.key.startswith("ethernet"):
        guess = "one interface a node"
        return Network(bandwidth=rate / per_node, interfaces=1.0, kind=kind, guess=guess)
    guess = "an interface for each device"
    return Network(bandwidth=rate, interfaces=per_node, kind=kind, guess=guess)


def rate_of(text: str) -> float | None:
    """Return the first rate in a text in bytes/s: ``200Gb/s``, ``50 GB/s``; None where it is 0."""
    found = _RATE.search(text)
    if found:
        value = float(found[1]) * _SCALE[found[2]]
        return (value if found[3] else value / 8.0) or None
    short = _SHORT.search(text)
    return float(short[1]) * 1e9 / 8.0 or None if short else None


def network_kind(text: str) -> LinkPreset | None:
    """Return the link of the catalogue that a network's text speaks of."""
    kind = link_preset_from_name(text)
    if kind is not None and kind.kind == "network":
        return kind
    for word in ("XDR", "NDR", "HDR100", "HDR", "EDR", "Omni-Path", "Slingshot"):
        if word.lower() in text.lower():
            return link_preset_from_name(f"InfiniBand {word}") or link_preset_from_name(word)
    rate = rate_of(text)
    lower = text.lower()
    family = next((w for w in ("roce", "efa", "ethernet") if w in lower), "")
    if rate is not None and family:
        per = rate * 8e-9 if rate <= NODE_ABOVE else 200.0
        return link_preset_from_name(f"{family} {per:g}")
    return None


def device_link(text: str, usual: float) -> tuple[LinkPreset | None, float | None]:
    """Return the link between devices of a node that a text names, and a rate each way.

    A printed rate is one way or both, whichever is nearer to what the link has, or to the `usual`
    bytes/s of such a node.
    """
    kind = link_preset_from_name(re.sub(r"(?i)gen\s*", "", text))
    if kind is not None and kind.kind == "network":
        kind = None
    if kind is None and "pcie" in text.lower():
        kind = link_preset_from_name("PCIe 4")
    rate = rate_of(text)
    if rate is None:
        return kind, None
    wanted = kind.bandwidth if kind else usual
    return kind, min((rate, rate / 2.0), key=lambda one: abs(math.log(one / wanted)))
