# SPDX-License-Identifier: Apache-2.0
"""Chats as tokens, each of them told whether it is of an answer.

A record is a list of messages, or a prompt with its completion: text or messages. Ids and answers
are those of TRL's `SFTTrainer` (huggingface.co/docs/trl) with `assistant_only_loss` for messages
and `completion_only_loss` for prompts: a token is of an answer where the characters are, and of a
completion from the first id on that is not that of the prompt alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.core.rulebook.data import DATA_CHAT_RECORD, DATA_CHAT_TEMPLATE
from echelon.core.serialize import content_hash
from echelon.training.data.chats.template import ChatTemplate, Message, Span
from echelon.training.data.records import read_records
from echelon.training.data.sources import SourceFiles
from echelon.training.data.tokenizer import (
    TOKENIZER_FILE_NAME,
    SubwordTokenizer,
    load_tokenizer,
    trained_vocabulary,
)

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chat:
    """Hold the tokens of one chat, which of them are of answers, and the bytes of its text."""

    tokens: NDArray[np.uint32]
    answers: NDArray[np.bool_]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatEncoder:
    """Turn records of chats into tokens, by a tokenizer and the template beside it."""

    tokenizer: SubwordTokenizer
    template: ChatTemplate
    _inner: Any = field(repr=False)

    @classmethod
    def load(cls, name: str) -> ChatEncoder:
        """Return that of a tokenizer.json, or of the folder of one; DataError for others."""
        if name == "bytes" or trained_vocabulary(name) is not None:
            raise DataError(
                DATA_CHAT_TEMPLATE.problem(
                    f"the tokenizer {name!r} has no chat template",
                    key="data.tokenizer",
                    suggestions=("a folder with tokenizer.json and chat_template.jinja",),
                )
            )
        tokenizer = load_tokenizer(name)
        assert isinstance(tokenizer, SubwordTokenizer)
        path = Path(name)
        file = path / TOKENIZER_FILE_NAME if path.is_dir() else path
        template = ChatTemplate.load(file)
        return cls(tokenizer=tokenizer, template=template, _inner=tokenizer.of_templates())

    @property
    def identity(self) -> str:
        """Return a hash of all that decides on the ids of a record."""
        told: dict[str, Any] = {
            "template": self.template.source,
            "special": dict(self.template.special_tokens),
        }
        return content_hash(told)

    @property
    def end(self) -> str:
        """Return the text that ends a completion."""
        end = self.tokenizer.description.end_of_document
        return self.template.special_tokens.get("eos_token") or self.tokenizer.spelled(end)

    def encode(self, record: Mapping[str, object], where: str) -> Chat:
        """Return the chat of a record; DataError, with the place `where`, for what is none."""
        tools = record.get("tools")
        if "prompt" not in record and "completion" not in record:
            messages = _messages(record, "messages", where)
            text, spans = self.template.answers(messages, where, tools=tools)
            return self._spanned(text, spans)
        prompt, completion = (_member(record, key, where) for key in ("prompt", "completion"))
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion.endswith(self.end):
                completion += self.end
            return self._completed(prompt, prompt + completion, special=True)
        asked = _messages(record, "prompt", where)
        given = _messages(record, "completion", where)
        head, _ = self.template.render(asked, where, tools=tools, add_generation_prompt=True)
        whole, _ = self.template.render([*asked, *given], where, tools=tools)
        return self._completed(head, whole, special=False)

    def _spanned(self, text: str, spans: Sequence[Span]) -> Chat:
        encoding = self._inner.encode(text, add_special_tokens=False)
        answers = np.zeros(len(encoding.ids), dtype=np.bool_)
        for start, end in (span for span in spans if span[0] < span[1]):
            first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
            if first is not None:
                answers[first : len(answers) if last is None else last + 1] = True
        return _chat(encoding.ids, answers, text)

    def _completed(self, prompt: str, whole: str, *, special: bool) -> Chat:
        """Return a prompt with its completion; `special` adds what begins text in general."""
        head = self._inner.encode(prompt, add_special_tokens=special).ids
        ids = self._inner.encode(whole, add_special_tokens=special).ids
        same = 0
        while same < min(len(head), len(ids)) and head[same] == ids[same]:
            same += 1
        return _chat(ids, np.arange(len(ids)) >= same, whole)


def read_chats(
    files: SourceFiles, encoder: ChatEncoder, *, max_bytes: int | None = None
) -> Iterator[Chat]:
    """Yield the chats of all files in order, until their text has `max_bytes`."""
    held = 0
    for file in files.files:
        for record, where in read_records(file):
            if max_bytes is not None and held >= max_bytes:
                return
            chat = encoder.encode(record, where)
            held += chat.num_bytes
            yield chat


def _chat(ids: Sequence[int], answers: NDArray[np.bool_], text: str) -> Chat:
    return Chat(
        tokens=np.asarray(ids, dtype=np.uint32), answers=answers, num_bytes=len(text.encode())
    )


def _member(record: Mapping[str, object], key: str, where: str) -> object:
    if key not in record:
        named = ", ".join(record) or "nothing"
        wanted = '"messages", or "prompt" and "completion"' if key == "messages" else f'"{key}"'
        raise DataError(DATA_CHAT_RECORD.problem(f"{where} has no {wanted}: it has {named}"))
    return record[key]


def _messages(record: Mapping[str, object], key: str, where: str) -> list[Message]:
    """Return the messages of a record; DataError that says which of them is wrong, and how."""
    found = _member(record, key, where)
    if not isinstance(found, list) or not found:
        kind = "empty" if found == [] else f"a {type(found).__name__}"
        wanted = "a list of messages" + (", as the other is" if key != "messages" else "")
        raise DataError(DATA_CHAT_RECORD.problem(f'{where}: "{key}" is {kind}, not {wanted}'))
    for place, message in enumerate(cast("list[object]", found)):
        if (wrong := _wrong(message)) is not None:
            raise DataError(
                DATA_CHAT_RECORD.problem(f'{where}: "{key}"[{place}] {wrong}', suggestions=ROLES)
            )
    return cast("list[Message]", found)


def _wrong(message: object) -> str | None:
    """Return what is wrong with a message; None where it is one."""
    if not isinstance(message, dict):
        return f"is a {type(message).__name__}, not an object"
    told = cast("dict[str, object]", message)
    if "role" not in told:
        return 'has no "role"'
    if told["role"] not in ROLES:
        return f"has the role {told['role']!r}, which is none of {', '.join(ROLES)}"
    if told.get("content") is None and not told.get("tool_calls"):
        return 'has no "content"'
    if not isinstance(told.get("content"), (str, list, type(None))):
        return f'has a "content" that is a {type(told["content"]).__name__}, not text'
    return None
