# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of a page's document, from its records: ``python -m web.formulas.schema``.

`web/src/document.schema.json` is this, and the TypeScript types come from that file; a test
compares it, so that Python and the page cannot differ.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from echelon.page.lessons.lesson import LessonBook
from echelon.planner.view.document import PageDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Hold one of each record that the page reads."""

    report: PageDocument
    lessons: LessonBook


def document_schema() -> dict[str, Any]:
    """Return the JSON Schema of what `html.py` writes: every member is there."""
    schema = TypeAdapter(Documents).json_schema(mode="serialization")
    for record in (schema, *schema["$defs"].values()):
        record["required"] = list(record["properties"])
    return schema


if __name__ == "__main__":
    print(json.dumps(document_schema(), indent=2))
