"""`echelon explain json`: the JSON Schema of what a search prints with `--json`."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def search_schema() -> dict[str, Any]:
    """Return the schema as it is published, `plan_search.schema.json`."""
    text = (files("echelon.cli") / "plan_search.schema.json").read_text(encoding="utf-8")
    return json.loads(text)


def schema_text(schema: dict[str, Any]) -> str:
    """Return the schema as a file that validators read."""
    return json.dumps(schema, indent=2) + "\n"
