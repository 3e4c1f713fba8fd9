# SPDX-License-Identifier: Apache-2.0
"""Write a document into the page: one file, nothing loaded, nothing of the data ever run.

The document is JSON in a script element that no browser runs. ``<``, ``>`` and ``&`` are escaped in
it, so that no text, ``</script>`` included, can end the element; numbers that JSON does not have
(NaN, infinities) become null. The lessons of the explorer, a megabyte that most readers never
open, stand beside it, packed: the page unpacks them when they are asked for.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from dataclasses import asdict
from html import escape
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

from echelon.config.files.new_file import write_new
from echelon.core.messages.plurals import in_singular
from echelon.page.explorer.document import ExplorerDocument
from echelon.planner.view.document import PageDocument

DATA = "<!--echelon:data-->"
"""Where the built page wants its document."""
TITLE = "<title>Echelon</title>"
_POLICY = "default-src 'none';"
_ESCAPES = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


AnyDocument: TypeAlias = PageDocument | ExplorerDocument


def page_html(document: AnyDocument, *, live: bool = False) -> str:
    """Return the page of a document; a `live` one asks where it came from for newer ones."""
    template = files("echelon.page").joinpath("page.html").read_text(encoding="utf-8")
    assert template.count(DATA) == 1, "the built page has one place for its document"
    asks = ' data-live="document.json"' if live else ""
    begin = f'<script type="application/json" id="echelon-data"{asks}>'
    data = f"{begin}{document_json(document)}</script>"
    if isinstance(document, ExplorerDocument):
        data += (
            f'<script type="application/gzip" id="echelon-book">{packed_book(document)}</script>'
        )
    if live:
        template = template.replace(_POLICY, f"{_POLICY} connect-src 'self';")
    titled = template.replace(TITLE, f"<title>{escape(document.title)}</title>")
    return titled.replace(DATA, data)


def document_json(document: AnyDocument) -> str:
    """Return a document as JSON that is safe inside of HTML; lessons are not in it."""
    content = asdict(document)
    content.pop("book", None)
    return "".join(_ESCAPES.get(char, char) for char in _json(content))


def packed_book(document: ExplorerDocument) -> str:
    """Return the lessons of a document as JSON: gzip in base64, the same for the same lessons."""
    text = _json(asdict(document.book))
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode("ascii")


def _json(content: dict[str, Any]) -> str:
    return json.dumps(page_values(content), ensure_ascii=False, separators=(",", ":"))


def write_page(document: AnyDocument, path: Path, *, key: str = "--out") -> None:
    """Write the page of a document to a new file; ConfigError where there is one."""
    write_new(path, page_html(document), key=key)


def page_values(value: Any) -> Any:
    """Values of a document as its page has them: texts in the singular, no number that is none."""
    if isinstance(value, str):
        return in_singular(value)
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): page_values(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [page_values(one) for one in value]
    return value
