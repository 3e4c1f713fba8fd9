# SPDX-License-Identifier: Apache-2.0
"""`echelon data`: turn text into token shards, and say what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from echelon.cli.flags import Json, read_bytes
from echelon.cli.output import note, print_json, print_result, working
from echelon.core.errors import ConfigError, Problem
from echelon.core.messages.plurals import in_singular
from echelon.core.units import binary_bytes, short_count

if TYPE_CHECKING:
    from echelon.api.generating import DataLook
    from echelon.training.data.prepare import DatasetSummary


def prepare(
    source: Annotated[
        tuple[str, ...],
        Parameter(help="Text, jsonl, parquet or arrow files, folders of them, or stdlib."),
    ],
    /,
    *,
    out: Annotated[Path, Parameter(help="The folder to write; it must not exist.")],
    tokenizer: Annotated[
        str, Parameter(help="bytes, bpe-N (trained on the sources), or a tokenizer.json.")
    ] = "bytes",
    format: Annotated[
        Literal["auto", "text", "jsonl", "parquet", "arrow", "chat"],
        Parameter(help="How to read the files; auto goes by their suffix, chat is JSON lines."),
    ] = "auto",
    field: Annotated[str, Parameter(help="The field of a record that holds the text.")] = "text",
    split: Annotated[str, Parameter(help="The part of a Hugging Face dataset.")] = "train",
    max_bytes: Annotated[
        str | None, Parameter(help='Stop after so many bytes of text, such as "2 GB" or 2e9.')
    ] = None,
    json: Json = False,
) -> int:
    """Turn text into token shards that a run reads by --set data.source=FOLDER."""
    from echelon.training.data.prepare import PrepareOptions, prepare

    limit = None if max_bytes is None else read_bytes("--max-bytes", max_bytes)
    if isinstance(limit, Problem):
        raise ConfigError(limit)
    options = PrepareOptions(format=format, field=field, split=split, max_bytes=limit)
    with working("preparing data", lines=not json):
        summary = prepare(source, out, tokenizer=tokenizer, options=options)
    if json:
        print_json("data prepare", asdict(summary))
        return 0
    print(_dataset_text(summary.dataset), end="")
    text = f"read        {summary.num_files} files, {binary_bytes(summary.text_bytes)} of text\n"
    if summary.num_empty:
        text += f"empty       {summary.num_empty} files or records\n"
    print(in_singular(text), end="")
    for what, count in summary.skipped.items():
        print(f"not read    {count} x {what}")
    note(f"next: echelon train run.toml {' '.join(_flags(out, summary.dataset))}")
    return 0


def show(
    folder: Annotated[Path, Parameter(help="A folder that echelon data prepare wrote.")],
    /,
    *,
    json: Json = False,
) -> int:
    """Say what is in prepared data, and whether it is whole."""
    from echelon.training.data.prepare import describe

    summary = describe(folder)
    print_result("data show", lambda: asdict(summary), lambda: _dataset_text(summary), as_json=json)
    return 0


def look(
    path: Annotated[
        Path, Parameter(help="The folder of a run, of prepared data, or of a mixture.")
    ],
    /,
    *,
    step: Annotated[
        int | None, Parameter(help="The step of a run whose sample is shown, from 1.")
    ] = None,
    sample: Annotated[
        int, Parameter(help="Which sample of the step, from 0: its text is shown.")
    ] = 0,
    json: Json = False,
) -> int:
    """Say what a run reads: sources, documents, ids in use; with --step, the text of a sample."""
    from echelon.api.generating import look_at

    found = look_at(path, step=step, sample=sample)
    print_result("data look", lambda: asdict(found), lambda: look_text(found), as_json=json)
    return 0


def look_text(found: DataLook) -> str:
    """Return what is in data, a source at a time, and a sample where one was asked for."""
    lines: list[str] = [f"{'data':<12}{found.path}", f"{'hash':<12}{found.hash}"]
    for one in found.sources:
        covered = f"{one.distinct} of {one.vocabulary} ids occur"
        lines += [
            "",
            f"{'source':<12}{one.name}",
            f"{'tokens':<12}{short_count(one.num_tokens)} ({one.num_tokens}), {covered}",
            f"{'documents':<12}{one.num_documents}, the longest of {one.longest} tokens",
        ]
        most = max((count for _, count in one.lengths), default=1)
        for length, count in one.lengths:
            bar = "#" * max(1, round(40 * count / most))
            lines.append(f"{'':<12}up to {length:>9} tokens  {bar} {count}")
        if one.share is not None:
            read = f"{100 * one.share:.2f} % of the sequences of the run"
            lines.append(f"{'read':<12}{read}, {one.times:.2f} times its training part")
    if (shown := found.sample) is not None:
        place = f"step {shown.step}, sample {shown.sample}, data rank {shown.data_rank}"
        by_source = ", ".join(
            f"{count} of {one.name}"
            for count, one in zip(shown.sources_of_step, found.sources, strict=True)
        )
        lines += [
            "",
            f"{'sample':<12}{place}: from {shown.source}",
            f"{'':<12}{shown.num_documents} documents, {shown.counted} labels count",
            f"{'step':<12}{by_source}",
            "",
            shown.text,
        ]
    return "\n".join(lines) + "\n"


def _flags(output: Path, dataset: DatasetSummary) -> Iterator[str]:
    """Yield what a run must be told to read this data."""
    from echelon.training.data.corpus import tokenizer_setting
    from echelon.training.data.tokenizer import trained_vocabulary

    yield f"--set data.source={output}"
    if dataset.tokenizer != "bytes":
        yield f"--set data.tokenizer={tokenizer_setting(output, dataset.tokenizer)}"
        # A short text may give fewer ids than were asked for.
        asked = trained_vocabulary(dataset.tokenizer) or 0
        yield f"--set model.vocab={max(asked, dataset.vocabulary)}"
    if dataset.num_answers is not None:
        yield "--set data.train_on=answers --set batch.documents=separate"


def _answers_text(dataset: DatasetSummary) -> str:
    count = dataset.num_answers or 0
    return f"{short_count(count)} ({count}) of these tokens, {count / dataset.num_tokens:.1%}"


def _dataset_text(dataset: DatasetSummary) -> str:
    size = binary_bytes(dataset.num_bytes)
    facts = (
        ("folder", dataset.path),
        ("tokens", f"{short_count(dataset.num_tokens)} ({dataset.num_tokens}), {dataset.dtype}"),
        ("documents", dataset.num_documents),
        *([("answers", _answers_text(dataset))] if dataset.num_answers is not None else []),
        ("shards", f"{dataset.num_shards}, {size}"),
        ("tokenizer", f"{dataset.tokenizer}, {dataset.vocabulary} ids ({dataset.tokenizer_hash})"),
        ("hash", dataset.hash),
    )
    return "".join(f"{name:<12}{value}\n" for name, value in facts)
