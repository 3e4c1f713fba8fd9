# SPDX-License-Identifier: Apache-2.0
"""The data of a run: prepared once below the folder of all runs, found again by its content.

`data.source` is "stdlib", text, or data that is prepared already. What has to be prepared goes to
`RUNS_DIR/data/HASH/`, where HASH covers the content of every source file, the tokenizer and the
options: another text is another folder, the same text is prepared once.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from echelon.config.job import DataSettings
from echelon.core.disk import sha256_of_file
from echelon.core.errors import DataError, Problem
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.rulebook.data import DATA_OUTPUT_EXISTS, DATA_TOKENIZER_SAME
from echelon.core.serialize import content_hash
from echelon.core.settings.list_types import phases_of, sources_of
from echelon.training.data.chats import ChatEncoder
from echelon.training.data.dataset import TokenDataset
from echelon.training.data.index import DATA_FOLDER, INDEX_FILE_NAME, INDEX_SCHEMA, read_index
from echelon.training.data.mixed_dataset import mix, write_mixture
from echelon.training.data.prepare import DEFAULT_OPTIONS, PrepareOptions, prepare, source_files
from echelon.training.data.sources import SourceFile
from echelon.training.data.tokenizer import (
    TOKENIZER_FILE_NAME,
    TokenizerDescription,
    load_tokenizer,
    require_same_tokenizer,
    trained_vocabulary,
)
from echelon.training.data.urls import sha256_of_url


def prepared_data(
    source: str,
    tokenizer: str,
    runs_dir: str | Path,
    *,
    options: PrepareOptions = DEFAULT_OPTIONS,
    pieces: PieceSizes = TRAINING_PIECES,
) -> Path:
    """Return the folder of prepared data for a run, and prepare it first where needed.

    Several processes may ask at once: each writes its own folder, one renames it into place, and
    all return that one.
    """
    folder = Path(source)
    if (folder / INDEX_FILE_NAME).is_file():
        _require_tokenizer(folder, read_index(folder).tokenizer, tokenizer)
        return folder
    output = Path(runs_dir) / DATA_FOLDER / _recipe_hash(source, tokenizer, options)
    if output.exists():
        return output
    try:
        prepare([source], output, tokenizer=tokenizer, options=options, pieces=pieces)
    except DataError as error:
        # Another process was faster: what it committed came from the same recipe.
        if error.rules != (DATA_OUTPUT_EXISTS.id,):
            raise
    return output


def data_of_settings(
    data: DataSettings,
    runs_dir: str | Path,
    *,
    max_bytes: int | None = None,
    pieces: PieceSizes = TRAINING_PIECES,
) -> Path:
    """Prepare the data of a run where needed, and return the folder: prepared data, or a mixture.

    With `max_bytes` no more text of a source is prepared, in `pieces`.
    """
    options = PrepareOptions(max_bytes=max_bytes)
    prepared = partial(prepared_data, runs_dir=runs_dir, pieces=pieces)
    if data.train_on == "answers":
        options = replace(options, format="chat")
    if not data.mixture:
        return prepared(data.source, data.tokenizer, options=options)
    names = sources_of(data.mixture)
    folders: list[Path] = []
    problems: list[Problem] = []
    for name in names:
        try:
            folders.append(prepared(name, data.tokenizer, options=options))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    parts = [TokenDataset.open(folder) for folder in folders]
    output = Path(runs_dir) / DATA_FOLDER
    mixed = mix(output, names, parts, phases_of(data.mixture))
    folder = output / f"mixture-{mixed.index.hash}"
    write_mixture(folder, mixed)
    return folder


def _recipe_hash(source: str, tokenizer: str, options: PrepareOptions) -> str:
    files = source_files([source], options).files
    template = ChatEncoder.load(tokenizer).identity if options.format == "chat" else ""
    if trained_vocabulary(tokenizer) is None:
        tokenizer = load_tokenizer(tokenizer).description.hash
    recipe: dict[str, Any] = {
        "files": [(file.name, file.format, _content(file)) for file in files],
        "tokenizer": tokenizer,
        "options": options,
        "schema": INDEX_SCHEMA,
    }
    if options.format == "chat":
        recipe["template"] = template
    return content_hash(recipe)


def _content(file: SourceFile) -> str:
    if file.url:
        return sha256_of_url(file.url)
    try:
        return sha256_of_file(file.path)
    except OSError:
        # `prepare` meets the same file and says what is wrong with it.
        return hashlib.sha256(f"unreadable {file.path}".encode()).hexdigest()


def tokenizer_setting(folder: Path, name: str) -> str:
    """Return the `data.tokenizer` that fits prepared data made with the tokenizer `name`."""
    known = name == "bytes" or trained_vocabulary(name) is not None
    return name if known else str(folder / TOKENIZER_FILE_NAME)


def _require_tokenizer(folder: Path, found: TokenizerDescription, wanted: str) -> None:
    """Raise DataError where the run names another tokenizer than the data was made with."""
    suggestions = (f'data.tokenizer = "{tokenizer_setting(folder, found.name)}"',)
    if trained_vocabulary(wanted) is None:
        expected = load_tokenizer(wanted).description
        expected_by = f"data.tokenizer = {wanted!r}"
        require_same_tokenizer(found, expected, expected_by=expected_by, suggestions=suggestions)
    elif found.name != wanted:
        raise DataError(
            DATA_TOKENIZER_SAME.problem(
                f"the data was made with tokenizer {found.name!r}, the run names {wanted!r}",
                key="data.tokenizer",
                suggestions=suggestions,
            )
        )
