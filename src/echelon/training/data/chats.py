# SPDX-License-Identifier: Apache-2.0
"""Chats as tokens, each of them told whether it is of an answer.

A record is a list of messages, or a prompt with its completion: text or messages. Ids and answers
are those of TRL's `SFTTrainer` (huggingface.co/docs/trl) with `assistant_only_loss` for messages
and `completion_only_loss` for prompts: a token is of an answer where the characters are, and of a
completion from the first id on that is not that of the prompt alone.

Templates are Jinja (jinja.palletsprojects.com) with the names that Hugging Face's
`apply_chat_template` gives them, run in its sandbox. `{% generation %}` is a call of a block here,
which notes where it writes: the whitespace rules of blocks hold for it as for any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import DataError, first_line
from echelon.core.optional import optional_package
from echelon.core.rulebook.data import DATA_CHAT_PREFIX, DATA_CHAT_RECORD, DATA_CHAT_TEMPLATE
from echelon.core.serialize import content_hash, decode_json
from echelon.training.data.records import read_records
from echelon.training.data.sources import SourceFiles
from echelon.training.data.tokenizer import (
    TEMPLATE_FILE_NAME,
    TOKENIZER_FILE_NAME,
    SubwordTokenizer,
    load_tokenizer,
    trained_vocabulary,
)

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = Mapping[str, object]
Span = tuple[int, int]
"""Characters [start, end) of a text."""

_CONFIG_FILE_NAME = "tokenizer_config.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")


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


class _Tracker:
    """Know which characters of what was written so far came from a generation block."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self.spans: list[Span] = []

    def __call__(self, caller: Callable[[], str]) -> str:
        text = caller()
        start = sum(map(len, self.blocks))
        self.spans.append((start, start + len(text)))
        return text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatTemplate:
    """Hold a template, and the special tokens that it may spell; `place` is where it was read."""

    source: str
    place: str
    special_tokens: Mapping[str, str]
    _compiled: Any = field(repr=False)
    _tracker: _Tracker = field(repr=False)

    @classmethod
    def load(cls, tokenizer_file: Path) -> ChatTemplate:
        """Return the template beside a tokenizer.json; DataError where there is none."""
        folder = tokenizer_file.parent
        config = _read_config(folder / _CONFIG_FILE_NAME)
        place = folder / TEMPLATE_FILE_NAME
        source: object = None
        if place.is_file():
            try:
                source = place.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise DataError(_template_problem(f"{place} cannot be read: {error}")) from error
        elif config:
            place = folder / _CONFIG_FILE_NAME
            source = _of_config(config)
        if not isinstance(source, str):
            raise DataError(
                _template_problem(
                    f"{folder} has no chat template: neither {TEMPLATE_FILE_NAME} nor "
                    f"chat_template in {_CONFIG_FILE_NAME}",
                    suggestions=(f"write {folder / TEMPLATE_FILE_NAME}",),
                )
            )
        tracker = _Tracker()
        return cls(
            source=source,
            place=str(place),
            special_tokens=_special_tokens(config),
            _compiled=_compile(source, str(place), tracker),
            _tracker=tracker,
        )

    @property
    def marks_answers(self) -> bool:
        """Return whether the template says by itself what the model writes."""
        return _GENERATION.search(self.source) is not None

    def render(
        self,
        messages: Sequence[Message],
        where: str,
        *,
        tools: object = None,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """Return the text of a chat, and what generation blocks wrote of it.

        DataError, with the place `where` of the chat, where the template fails.
        """
        tracker = self._tracker
        tracker.blocks, tracker.spans = [], []
        variables = {
            **self.special_tokens,
            "messages": [_with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # Piece by piece: a generation block must know what was written before it.
            for block in self._compiled.generate(**variables):
                tracker.blocks.append(block)
        except Exception as error:  # a template may fail in any way that an expression can
            raise DataError(
                _template_problem(f"{where}: {self.place} fails: {first_line(error)}")
            ) from error
        return "".join(tracker.blocks), tracker.spans

    def answers(
        self, messages: Sequence[Message], where: str, *, tools: object = None
    ) -> tuple[str, list[Span]]:
        """Return the text of a chat and the characters of its answers.

        What generation blocks write, where the template has them. Else an answer is what follows
        the chat up to it, with the beginning of an answer, to the end of the chat with it;
        DataError where the one is no beginning of the other.
        """
        text, spans = self.render(messages, where, tools=tools)
        if self.marks_answers:
            return text, spans
        spans = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            head = messages[:place]
            before, _ = self.render(head, where, tools=tools, add_generation_prompt=True)
            after, _ = self.render(messages[: place + 1], where, tools=tools)
            if not after.startswith(before) or not text.startswith(after):
                raise DataError(
                    DATA_CHAT_PREFIX.problem(
                        f"{where}: {self.place} has no generation block, and writes the chat up to "
                        f"message {place} otherwise alone than at the head of the whole",
                        suggestions=("{% generation %} around what the model writes",),
                    )
                )
            spans.append((len(before), len(after)))
        return text, spans


def _compile(source: str, place: str, tracker: _Tracker) -> Any:
    purpose = "writing chats by a template"
    jinja = optional_package("jinja2", extra="train", purpose=purpose)
    sandbox = optional_package("jinja2.sandbox", extra="train", purpose=purpose)

    def fail(message: str) -> None:
        raise jinja.TemplateError(message)

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=fail, strftime_now=now, echelon_generation=tracker)
    called = _GENERATION.sub(r"{%\1 call echelon_generation() \2%}", source)
    called = _END_GENERATION.sub(r"{%\1 endcall \2%}", called)
    try:
        return environment.from_string(called)
    except jinja.TemplateError as error:
        raise DataError(
            _template_problem(f"{place} is no template: {first_line(error)}")
        ) from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON; Jinja's own filter would escape what HTML does."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _with_reasoning(message: Message) -> Message:
    """Return a message whose reasoning has each name that templates read."""
    found = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if found is None:
        return dict(message)
    return {"thinking": found, **message, "reasoning_content": found}


def _read_config(path: Path) -> Mapping[str, object]:
    if not path.is_file():
        return {}
    try:
        found = decode_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(_template_problem(f"{path} cannot be read: {error}")) from error
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}


def _of_config(config: Mapping[str, object]) -> object:
    """Return the template of a configuration: of several, the one that is named "default"."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = [cast("dict[str, object]", one) for one in found if isinstance(one, dict)]
        return next((one.get("template") for one in named if one.get("name") == "default"), None)
    return found


def _special_tokens(config: Mapping[str, object]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL:
        value = config.get(name)
        if isinstance(value, dict):
            value = cast("dict[str, object]", value).get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _template_problem(text: str, suggestions: Sequence[str] = ()) -> Any:
    return DATA_CHAT_TEMPLATE.problem(text, key="data.tokenizer", suggestions=suggestions)
