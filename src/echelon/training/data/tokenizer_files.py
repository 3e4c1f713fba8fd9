# SPDX-License-Identifier: Apache-2.0
"""A tokenizer as the files that `AutoTokenizer.from_pretrained` reads: the same ids for all text.

The byte tokenizer becomes byte-pair encoding without a pair: each byte is the character that
byte-level encoders write for it (Radford et al., "Language Models are Unsupervised Multitask
Learners", 2019), and has its own number as its id.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from echelon.training.data.tokenizer import (
    BYTES_VOCABULARY,
    END_OF_DOCUMENT,
    TOKENIZER_FILE_NAME,
    ByteTokenizer,
    Tokenizer,
)

GENERATION_FILE_NAME = "generation_config.json"


def tokenizer_files(tokenizer: Tokenizer, max_positions: int) -> Mapping[str, str]:
    """Return the files of a tokenizer, by name."""
    text = _bytes_json() if isinstance(tokenizer, ByteTokenizer) else tokenizer.to_json()
    end = tokenizer.description.end_of_document
    config = {
        "clean_up_tokenization_spaces": False,
        "eos_token": _spelling(json.loads(text), end),
        "model_max_length": max_positions,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {
        TOKENIZER_FILE_NAME: text,
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        GENERATION_FILE_NAME: json.dumps({"eos_token_id": end}, indent=2) + "\n",
    }


def _spelling(tokenizer: Mapping[str, object], token: int) -> str | None:
    """Return how a tokenizer.json writes a token; None where it does not say."""
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("id") == token:
            return str(entry.get("content"))
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        return next((str(text) for text, number in vocabulary.items() if number == token), None)
    return None


def _bytes_json() -> str:
    plain = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = BYTES_VOCABULARY - 1
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": end,
                "content": END_OF_DOCUMENT,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **plain},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **plain},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {**dict(_characters()), END_OF_DOCUMENT: end},
            "merges": [],
        },
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _characters() -> Iterator[tuple[str, int]]:
    """Yield the character of each byte: itself where it is printable, else one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = 0
    for byte in range(256):
        if byte in printable:
            yield chr(byte), byte
        else:
            yield chr(0x100 + others), byte
            others += 1
