# SPDX-License-Identifier: Apache-2.0
"""What stands beside weights that leave: the tokenizer, its chat template, how text is generated.

A run knows its tokenizer by the hash of its content. Where a folder that the run file names has the
same one (`data.tokenizer`, or the weights that the run began with), its files are copied as they
are; else they are written from what the prepared data keeps, as the files that
`AutoTokenizer.from_pretrained` reads: the same ids for all text.

The byte tokenizer becomes byte-pair encoding without a pair: each byte is the character that
byte-level encoders write for it (Radford et al., "Language Models are Unsupervised Multitask
Learners", 2019), and has its own number as its id.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.core.errors import ConfigError, DataError
from echelon.core.serialize import decode_json
from echelon.training.data.corpus import data_of_settings
from echelon.training.data.mixed_dataset import AnyDataset, MixedDataset, open_data
from echelon.training.data.tokenizer import (
    BYTES_VOCABULARY,
    END_OF_DOCUMENT,
    TEMPLATE_FILE_NAME,
    TOKENIZER_FILE_NAME,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
)

_COPIED = (
    *(TOKENIZER_FILE_NAME, TEMPLATE_FILE_NAME, "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
)
"""Files of a tokenizer that libraries look for."""

GENERATION_FILE_NAME = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesBeside:
    """Hold the content of files by name, what is said of them, and what config.json says too."""

    files: Mapping[str, bytes]
    said: str
    config: Mapping[str, object] = field(default_factory=dict[str, object])

    def write(self, folder: Path) -> None:
        """Write the files."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


def files_beside(run_file: Path, data: Path | None, wanted: str, max_positions: int) -> FilesBeside:
    """Return what stands beside weights that were trained with the tokenizer of a hash.

    `data` is where the run's data is; None for what its file says. Where nothing has the tokenizer
    any more, why is said.
    """
    known = list(_named_folders(run_file))
    generation = _generation(known)
    for folder, tokenizer in known:
        if tokenizer is not None and tokenizer.description.hash == wanted:
            told = _trained_template(run_file, data)
            return FilesBeside(
                files={**_copied(folder), **told, **generation},
                said=f"{_told(tokenizer)}, as in {folder}",
                config={"eos_token_id": _end(generation, tokenizer)},
            )
    try:
        found = open_data(_data_of(run_file) if data is None else data)
        tokenizer = found.tokenizer()
    except (ConfigError, DataError, OSError) as error:
        said = f"none, for the run's data is not there: {str(error).splitlines()[0]}"
        return FilesBeside(files=generation, said=said)
    if tokenizer.description.hash != wanted:
        said = "none: the data of the run was made anew with another tokenizer"
        return FilesBeside(files=generation, said=said)
    texts = tokenizer_files(tokenizer, max_positions)
    files = {name: text.encode() for name, text in texts.items()}
    return FilesBeside(
        files={**files, **_template(found), **generation},
        said=_told(tokenizer),
        config={"eos_token_id": _end(generation, tokenizer)},
    )


def _trained_template(run_file: Path, data: Path | None) -> dict[str, bytes]:
    """Return the template that the data was made with: beside a tokenizer it may be a new one."""
    try:
        return _template(open_data(_data_of(run_file) if data is None else data))
    except (ConfigError, DataError, OSError):
        return {}


def _template(found: AnyDataset) -> dict[str, bytes]:
    first = found.parts[0] if isinstance(found, MixedDataset) else found
    file = first.path / TEMPLATE_FILE_NAME
    return {file.name: file.read_bytes()} if file.is_file() else {}


def _told(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.description.name}, {tokenizer.description.vocabulary:,} ids"


def _job(run_file: Path) -> Job | None:
    try:
        return load_job(run_file)
    except (ConfigError, OSError):
        return None


def _data_of(run_file: Path) -> Path:
    job = load_job(run_file)
    return data_of_settings(job.data, job.train.runs_dir)


def _named_folders(run_file: Path) -> Iterator[tuple[Path, Tokenizer | None]]:
    """Yield the folders that a run file names, with the tokenizer in each of them."""
    job = _job(run_file)
    if job is None:
        return
    for name in (job.data.tokenizer, job.train.weights):
        path = Path(name) if name else None
        if path is None or not path.exists():
            continue
        folder = path if path.is_dir() else path.parent
        try:
            yield folder, load_tokenizer(str(folder))
        except DataError:
            yield folder, None


def _copied(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in _COPIED if (folder / name).is_file()}


def _generation(known: list[tuple[Path, Tokenizer | None]]) -> dict[str, bytes]:
    """Return how text is generated, as the model that the run began with says it."""
    for folder, _ in known[::-1]:
        file = folder / GENERATION_FILE_NAME
        if file.is_file():
            return {GENERATION_FILE_NAME: file.read_bytes()}
    return {}


def _end(generation: Mapping[str, bytes], tokenizer: Tokenizer) -> object:
    """Return the ids that end a text: of the model that the run began with, or the tokenizer's."""
    try:
        content = decode_json(generation.get(GENERATION_FILE_NAME, b"{}"))
    except ValueError:
        content = {}
    found = content.get("eos_token_id") if isinstance(content, dict) else None
    return tokenizer.description.end_of_document if found is None else found


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
