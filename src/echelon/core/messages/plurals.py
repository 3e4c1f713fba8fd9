# SPDX-License-Identifier: Apache-2.0
"""Counts in sentences: ``1 ranks are`` is written ``1 rank is``.

Messages are made of numbers and plural words. Every text passes here once on its way to a reader
(problems of rules, lines of pages, notes), so the code that writes a text never tests for one.
"""

from __future__ import annotations

import re

WORDS = [
    *("ranks", "microbatches", "sequences", "tokens", "steps", "blocks", "layers", "stages"),
    *("heads", "devices", "nodes", "samples", "positions", "experts", "islands", "servers"),
    *("workers", "replicas", "groups", "processes", "hosts", "GPUs", "cores", "files", "tensors"),
    *("rows", "plans", "meshes", "runs", "parameters", "documents", "chats", "checkpoints"),
    *("buckets", "units", "pairs", "slots", "problems", "messages", "actions", "calls"),
    *("validations", "rounds", "threads", "links", "keys", "ids", "lines", "columns", "words"),
    *("settings", "chunks", "pieces", "slices", "shards", "batches", "passes", "lists", "models"),
    *("figures", "presets", "rules", "matmuls", "times", "bytes", "seconds", "iterations"),
    *("weights", "values", "choices", "numbers", "prompts", "names", "rooms", "operations"),
    *("records", "cells", "places"),
]
"""Nouns that are counted."""

KINDS = [
    *("data", "pipeline", "tensor", "context", "expert", "parameter", "virtual", "global"),
    *("optimizer", "training", "validation", "forward", "backward", "local", "query", "key/value"),
    *("legal", "whole", "more", "other", "equal"),
]
"""Words between a number and its noun."""

VERBS = {
    "are": "is",
    "were": "was",
    "have": "has",
    "do": "does",
    "take": "takes",
    "hold": "holds",
    "need": "needs",
    "wait": "waits",
    "fit": "fits",
    "differ": "differs",
    "change": "changes",
}
"""Verbs right behind the noun."""

NUMBERED = [
    *("rank", "stage", "step", "group", "expert", "layer", "block", "node", "device", "worker"),
    *("server", "island", "replica", "process", "level", "bucket", "unit", "microbatch", "slot"),
    *("version", "epoch", "ZeRO", "zero", "chunk", "line", "column", "row", "seed"),
]
"""Words before a one that is a name: ``rank 1 runs`` counts nothing."""

OPERATORS = ("+", "-", "*", "/", "to", ">", ">=")
"""Words before a one that counts nothing: ``p + 1 stages``, ``1 to 1 ranks``, ``k > 1 nodes``."""

COUNT = re.compile(
    rf"(?P<before>\S+ )?(?<![\w.,:/=+*^-])1 (?P<kind>(?:(?:{'|'.join(KINDS)}) )?)"
    rf"(?P<noun>{'|'.join(WORDS)})\b(?P<verb>(?: (?:{'|'.join(VERBS)})\b)?)"
)


def in_singular(text: str) -> str:
    """Return a text in which one of something is not several."""
    return COUNT.sub(_one, text) if "1 " in text else text


def _one(match: re.Match[str]) -> str:
    before = match["before"] or ""
    word = before.strip("( ")
    if word in NUMBERED or word in OPERATORS or word.isdigit():
        return match[0]
    noun = match["noun"]
    singular = noun[:-2] if noun.endswith(("ches", "shes", "sses")) else noun[:-1]
    verb = match["verb"]
    return f"{before}1 {match['kind']}{singular}" + (f" {VERBS[verb.strip()]}" if verb else "")
