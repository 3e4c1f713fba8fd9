# SPDX-License-Identifier: Apache-2.0
"""Rules of sources that are read over a network."""

from echelon.core.rules import Rule

DATA_URL_PLAIN = Rule(
    id="data-url-plain",
    why="""
    What a run reads stands in its run.toml, in its logs and in trackers. So a URL carries no user
    and no password: the package that reads it has its own settings for accounts.
    """,
    bad="data.source = 'https://me:secret@example.com/corpus.jsonl'",
    fixed="data.source = 'https://example.com/corpus.jsonl'",
)

DATA_URL_FAILS = Rule(
    id="data-url-fails",
    why="""
    A connection that breaks is opened again at the byte where it stopped, after half a second, one
    second, two and four. After that the source counts as unreadable. Nothing half-finished is kept:
    tokens count once all sources were read to their end.
    """,
    bad="echelon data prepare https://example.com/c.jsonl --out tokens     # the server is gone",
    fixed="wait, or copy the file once:\ncurl -O https://example.com/c.jsonl\n"
    "echelon data prepare c.jsonl --out tokens",
)
