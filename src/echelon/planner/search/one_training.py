# SPDX-License-Identifier: Apache-2.0
"""What a search leaves alone: settings by which another number of ranks is another training."""

from __future__ import annotations

from collections.abc import Mapping

from echelon.config.derived.replicas import COUNT_KEY, EVERY_KEY, UPDATES_KEY
from echelon.config.entries import Entry
from echelon.config.settings.value_types import toml_text
from echelon.core.errors import ConfigError
from echelon.core.rulebook.planner import SEARCH_SPLITS_ONE_TRAINING

LEFT_ALONE: Mapping[str, tuple[object, str]] = {
    EVERY_KEY: (0, "a search chooses mesh.dp_replicate"),
    COUNT_KEY: (0, "servers and their workers are not searched"),
    UPDATES_KEY: ("synchronous", "a search chooses how many workers are late"),
}
"""Each with the value that a search takes, and why no other."""


def require_one_training(settings: Mapping[str, Entry]) -> None:
    """Raise ConfigError with every setting of a run that a search cannot keep and choose around."""
    problems = [
        SEARCH_SPLITS_ONE_TRAINING.problem(
            f"{key} = {toml_text(entry.value)}, and {why}",
            key=key,
            set_by=entry.source,
            suggestions=(
                f"{key} = {toml_text(value)}",
                "a run with a mesh, without --cluster and --search",
            ),
        )
        for key, (value, why) in LEFT_ALONE.items()
        if (entry := settings.get(key)) is not None and entry.value != value
    ]
    if problems:
        raise ConfigError(problems)
