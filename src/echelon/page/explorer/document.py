# SPDX-License-Identifier: Apache-2.0
"""What the explorer's page is given: tables, and where its controls start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from echelon.config.cluster.settings import read_typed_cluster
from echelon.config.presets import preset_names
from echelon.core.errors import ConfigError
from echelon.core.rulebook.config import BAD_ARGUMENT, UNKNOWN_PRESET
from echelon.core.rules import did_you_mean
from echelon.page.explorer.broken_rules import broken_rules
from echelon.page.explorer.controls import PLAIN, Controls
from echelon.page.explorer.tables import explorer_tables
from echelon.page.lessons.catalog import lesson_book
from echelon.page.lessons.lesson import LessonBook
from echelon.planner.view.document import SCHEMA, this_version

COUNTS = (8, 64, 1024, 16384)  # devices
DEVICES = ("a100-80gb", "h100", "h200", "b200", "mi300x")
"""What the page offers beside the cluster that is asked for."""
MODEL, CLUSTER = "llama3-8b", "64xh100"
"""Where the controls start where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplorerDocument:
    """Hold all that the page of the explorer is given."""

    schema: int = SCHEMA
    kind: Literal["explorer"] = "explorer"
    title: str
    start: dict[str, Any]
    tables: dict[str, Any]
    book: LessonBook
    made_by: str = field(default_factory=this_version)


def explorer_page(model: str = MODEL, cluster: str = CLUSTER) -> ExplorerDocument:
    """Return the page, its controls at a model and a cluster; ConfigError for unknown ones."""
    _require_known(model, cluster)
    named = [f"{count}x{device}" for device in DEVICES for count in COUNTS]
    tables = explorer_tables(preset_names("models"), [*dict.fromkeys((cluster, *named, "laptop"))])
    chosen = next(one for one in tables["models"] if one["name"] == model)
    first = tables["clusters"][0]
    controls = start_controls(tables, chosen, first)
    return ExplorerDocument(
        title=f"Explorer: {model} on {first['name']}",
        start={
            "model": model,
            "cluster": first["name"],
            **{name: getattr(controls, name) for name in Controls.__slots__},
        },
        tables=tables,
        book=lesson_book(),
    )


def _require_known(model: str, cluster: str) -> None:
    """Raise ConfigError for a model that is no preset, and for a cluster that no name makes."""
    known = preset_names("models")
    if model not in known:
        near = did_you_mean(model, known)
        raise ConfigError(
            [
                UNKNOWN_PRESET.problem(
                    f"{model} is no preset of a model", key="--model", suggestions=near or known
                )
            ]
        )
    read_typed_cluster(cluster, "--cluster")
    if cluster.endswith(".toml"):
        why = f"{cluster} is a file, which a page on another machine can't name"
        raise ConfigError([BAD_ARGUMENT.problem(why, key="--cluster", suggestions=("64xh100",))])


def start_controls(
    tables: dict[str, Any], model: dict[str, Any], cluster: dict[str, Any]
) -> Controls:
    """Return controls that break no rule: tensor ranks of a node, all else ZeRO."""
    length = max(n for n in tables["lengths"] if n <= min(8192, model["shape"]["max_positions"]))
    for tp in _divisors(cluster["devices_per_node"]):
        shards = cluster["devices"] // tp
        for sequence_parallel in (True, False):
            plain: dict[str, Any] = {**PLAIN, "sequence_parallel": sequence_parallel}
            found = Controls(
                **plain,
                pp=1,
                dp_replicate=1,
                dp_shard=shards,
                cp=1,
                tp=tp,
                zero=3 if shards > 1 else 0,
                schedule="1f1b",
                microbatch=1,
                sequences=max(shards, 4),
                length=length,
                precision="bf16" if cluster["gpus"] else "fp32",
                recompute="none",
            )
            if not broken_rules(found, model, cluster):
                return found
    raise AssertionError("one tensor rank breaks no rule")


def _divisors(number: int) -> Sequence[int]:
    return [n for n in (8, 4, 2, 1) if number % n == 0]
