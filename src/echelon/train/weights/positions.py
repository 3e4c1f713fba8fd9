"""Whether weights were trained on with rotary positions that are not computed here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from echelon.config.config_json import LLAMA3_ROPE, PLAIN_ROPE, rope_kind, rope_of
from echelon.core.errors import Problem
from echelon.core.rulebook.weights import WEIGHTS_POSITIONS
from echelon.train.weights.source import SETTING


def position_problems(path: Path) -> Iterator[Problem]:
    """Yield that a config.json beside weights turns positions as no model here does.

    Without one, or where it cannot be read, nothing is known: a file of weights does not say.
    """
    beside = (path if path.is_dir() else path.parent) / "config.json"
    try:
        config = json.loads(beside.read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(config, dict):
        return
    key, rope = rope_of(cast("dict[str, object]", config))
    kind = rope_kind(rope)
    if kind not in (PLAIN_ROPE, LLAMA3_ROPE):
        yield WEIGHTS_POSITIONS.problem(
            f"{path} belongs to rotary positions of the kind {json.dumps(kind)} ({beside}: {key}), "
            "which are not computed: with others these weights are another model",
            key=SETTING,
            set_by=f"{beside}: {key}",
        )
