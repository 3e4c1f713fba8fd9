"""The types of the page's TypeScript come from the records that Python writes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from jsonschema import Draft202012Validator

from echelon.page.lessons.catalog import lesson_book
from tests.page.test_html import document
from web.formulas.schema import Documents, document_schema

WEB = Path(__file__).parents[2] / "web"


def test_the_schema_that_types_are_generated_from_is_that_of_the_records() -> None:
    there = json.loads((WEB / "src" / "document.schema.json").read_text(encoding="utf-8"))
    assert there == document_schema(), "python -m web.formulas.schema, then npm run types in web/"


def test_every_record_has_a_type() -> None:
    types = (WEB / "src" / "document.ts").read_text(encoding="utf-8")
    for name, record in document_schema()["$defs"].items():
        assert f"export interface {name} {{" in types
        body = types[types.index(f"export interface {name} {{") :]
        body = body[: body.index("\n}")]
        # Every member is there, and none of them may be left out.
        assert [m for m in record["properties"] if f"\n  {m}: " not in body] == []


def test_a_document_is_what_the_schema_says() -> None:
    one = Documents(report=document(), lessons=lesson_book())
    found = json.loads(json.dumps(asdict(one)))
    Draft202012Validator(document_schema()).validate(found)
