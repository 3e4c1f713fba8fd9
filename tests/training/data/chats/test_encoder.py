"""Chats as tokens: ids and answers are those of TRL; what is no chat is refused with its line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echelon.core.errors import DataError
from echelon.training.data.chats import ChatEncoder, ChatTemplate
from tests.training.data.chats.made_tokenizers import (
    CHATS,
    FORGETFUL,
    MARKED,
    PAIRS,
    PLAIN,
    TURNS,
    Record,
    tokenizer_folder,
    turn,
)

ASKED = [turn("user", "a < b?"), turn("assistant", "yes")]


def of_trl(folder: Path, records: Sequence[Record], *, assistant_only: bool) -> list[Any]:
    """Return (ids, labels) of each record as `SFTTrainer` prepares them; nothing is trained."""
    datasets = pytest.importorskip("datasets")
    sft = pytest.importorskip("trl.trainer.sft_trainer")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    arguments = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=assistant_only,
        max_length=None,
        packing=False,
        shuffle_dataset=False,
    )
    trainer = SimpleNamespace(
        chat_template=None,
        _tokenizer=tokenizer,
        completion_only_loss="prompt" in records[0],
    )
    dataset = datasets.Dataset.from_list([dict(record) for record in records])
    found = sft.SFTTrainer._prepare_dataset(
        trainer, dataset, tokenizer, arguments, False, None, "train"
    )
    return [(row["input_ids"], row["labels"]) for row in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "records"),
    [(MARKED, CHATS), (PLAIN, PAIRS), (PLAIN, TURNS), (MARKED, TURNS)],
    ids=["messages", "text", "turns", "marked turns"],
)
def test_ids_and_answers_are_those_of_trl(
    tmp_path: Path, template: str, records: Sequence[Record]
) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", template)
    encoder = ChatEncoder.load(str(folder))
    expected = of_trl(folder, records, assistant_only="messages" in records[0])
    for record, (ids, labels) in zip(records, expected, strict=True):
        chat = encoder.encode(record, "here")
        assert chat.tokens.tolist() == ids
        assert chat.answers.tolist() == [label != -100 for label in labels]
        assert 0 < chat.answers.sum() < len(ids)


@pytest.mark.slow
def test_answers_without_marks_are_those_of_completions_of_trl(tmp_path: Path) -> None:
    """A chat of one answer is a prompt and its completion, which TRL tells apart, too."""
    folder = tokenizer_folder(tmp_path / "tokenizer", PLAIN)
    encoder = ChatEncoder.load(str(folder))
    (record,) = TURNS
    whole = {"messages": [*record["prompt"], *record["completion"]]}  # type: ignore[misc]
    ((ids, labels),) = of_trl(folder, [record], assistant_only=False)
    chat = encoder.encode(whole, "here")
    assert chat.tokens.tolist() == ids
    assert chat.answers.tolist() == [label != -100 for label in labels]


@pytest.mark.parametrize(
    ("template", "record", "answers"),
    [
        (MARKED, CHATS[1], "gr\u00fcn \U0001f33f<E>rot<E>"),
        (PLAIN, CHATS[1], "gr\u00fcn \U0001f33f<E>\nrot<E>\n"),
        (PLAIN, PAIRS[0], " blue.<E>"),
        (MARKED, TURNS[0], "4<E>"),
    ],
    ids=["marked", "plain", "text", "turns"],
)
def test_what_counts_is_what_the_model_says(
    tmp_path: Path, template: str, record: Record, answers: str
) -> None:
    """Each end of an answer is one token, and counts: the model learns where to stop."""
    encoder = ChatEncoder.load(str(tokenizer_folder(tmp_path / "tokenizer", template)))
    chat = encoder.encode(record, "here")
    end = encoder.tokenizer.description.end_of_document
    counted = chat.tokens[chat.answers].tolist()
    ends = [-1, *(place for place, token in enumerate(counted) if token == end), len(counted)]
    said = [
        encoder.tokenizer.decode(counted[first + 1 : last])
        for first, last in itertools.pairwise(ends)
    ]
    assert "<E>".join(said) == answers


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "a"}, '"messages", or "prompt" and "completion": it has text'),
        ({"prompt": "a"}, 'no "completion"'),
        ({"messages": []}, '"messages" is empty'),
        ({"messages": "a"}, '"messages" is a str'),
        ({"messages": ["a"]}, '"messages"[0] is a str'),
        ({"messages": [{"content": "a"}]}, '"messages"[0] has no "role"'),
        ({"messages": [{"role": "user"}]}, '"messages"[0] has no "content"'),
        ({"messages": [turn("user", "a"), turn("gpt", "b")]}, "[1] has the role 'gpt'"),
        ({"messages": [{"role": "user", "content": 3}]}, "a int, not text"),
        ({"prompt": "a", "completion": [turn("assistant", "b")]}, '"prompt" is a str'),
    ],
)
def test_what_is_no_chat_is_refused_with_its_place(
    tmp_path: Path, record: Record, said: str
) -> None:
    encoder = ChatEncoder.load(str(tokenizer_folder(tmp_path / "tokenizer", MARKED)))
    with pytest.raises(DataError) as refused:
        encoder.encode(record, "chats.jsonl:7")
    assert refused.value.rules == ("data-chat-record",)
    assert "chats.jsonl:7" in str(refused.value)
    assert said in str(refused.value)


def test_a_tool_call_needs_no_content(tmp_path: Path) -> None:
    encoder = ChatEncoder.load(str(tokenizer_folder(tmp_path / "tokenizer", MARKED)))
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    chat = encoder.encode({"messages": [turn("user", "a"), call]}, "here")
    assert chat.answers.sum()


def test_an_empty_answer_has_no_token(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    encoder = ChatEncoder.load(str(tokenizer_folder(tmp_path / "tokenizer", template)))
    empty = encoder.encode({"messages": [turn("assistant", "")]}, "here")
    assert (len(empty.tokens), len(empty.answers)) == (0, 0)
    chat = encoder.encode({"messages": [turn("assistant", ""), turn("assistant", "b")]}, "here")
    assert chat.answers.tolist() == [True]


@pytest.mark.parametrize("name", ["bytes", "bpe-512"])
def test_a_tokenizer_without_files_has_no_template(name: str) -> None:
    with pytest.raises(DataError) as refused:
        ChatEncoder.load(name)
    assert refused.value.rules == ("data-chat-template",)


def test_a_forgetful_template_without_marks_is_refused(tmp_path: Path) -> None:
    encoder = ChatEncoder.load(str(tokenizer_folder(tmp_path / "tokenizer", FORGETFUL)))
    with pytest.raises(DataError) as refused:
        encoder.encode(CHATS[1], "chats.jsonl:2")
    assert refused.value.rules == ("data-chat-prefix",)
    assert "chats.jsonl:2" in str(refused.value)


def test_the_identity_covers_the_template_and_its_tokens(tmp_path: Path) -> None:
    one = ChatEncoder.load(str(tokenizer_folder(tmp_path / "one", MARKED)))
    two = ChatEncoder.load(str(tokenizer_folder(tmp_path / "two", PLAIN)))
    folder = tokenizer_folder(tmp_path / "three", MARKED)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "!"}))
    three = ChatEncoder.load(str(folder))
    assert len({one.identity, two.identity, three.identity}) == 3
    assert three.end == "!"


def loaded(folder: Path, template: object, **config: object) -> ChatTemplate:
    """Return the template of a tokenizer_config.json."""
    told = {"chat_template": template, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return ChatTemplate.load(folder / "tokenizer.json")


def test_the_file_beside_the_tokenizer_comes_before_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file")
    assert loaded(tmp_path, "configuration").source == "file"
    (tmp_path / "chat_template.jinja").unlink()
    several = [{"name": "tools", "template": "other"}, {"name": "default", "template": "this"}]
    assert loaded(tmp_path, several).source == "this"


def test_templates_know_what_those_of_hugging_face_know(tmp_path: Path) -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%%') }}{{ tools is none }}"
    )
    template = loaded(tmp_path, source, bos_token={"content": "<s>"})
    text, spans = template.render(ASKED, "here")
    assert text == (
        '<s>{"role": "user", "content": "a < b?"}{"role": "assistant", "content": "yes"}%True'
    )
    assert spans == []


def test_reasoning_has_each_of_its_names(tmp_path: Path) -> None:
    template = loaded(tmp_path, "{{ messages[0].reasoning_content }}/{{ messages[0].thinking }}")
    message = {"role": "assistant", "content": "4", "reasoning": "2 + 2"}
    assert template.render([message], "here")[0] == "2 + 2/2 + 2"


def test_generation_blocks_say_where_they_write(tmp_path: Path) -> None:
    source = (
        "{%- for m in messages %}<{{ m.role }}>"
        "{%- generation -%}  {{ m.content }}  {%- endgeneration -%} ;\n{% endfor %}"
    )
    template = loaded(tmp_path, source)
    text, spans = template.answers(ASKED, "here")
    assert text == "<user>a < b?;\n<assistant>yes;\n"
    assert [text[start:end] for start, end in spans] == ["a < b?", "yes"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('no tools here') }}", "no tools here"),
        ("{{ messages[5].content.upper() }}", "chats.jsonl:3"),
        ("{{ messages.append(1) }}", "chats.jsonl:3"),
        ("{{ ''.__class__.__mro__ }}", "chats.jsonl:3"),
    ],
)
def test_a_template_that_fails_is_told_with_the_line(
    tmp_path: Path, source: str, said: str
) -> None:
    template = loaded(tmp_path, source)
    with pytest.raises(DataError) as refused:
        template.render(ASKED, "chats.jsonl:3")
    assert refused.value.rules == ("data-chat-template",)
    assert said in str(refused.value)


@pytest.mark.parametrize("source", [None, 3, "{% if %}", "{% for m in messages %}"])
def test_what_is_no_template_is_refused(tmp_path: Path, source: object) -> None:
    with pytest.raises(DataError) as refused:
        loaded(tmp_path, source)
    assert refused.value.rules == ("data-chat-template",)
