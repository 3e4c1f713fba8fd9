"""Templates of chats: where they are read, what they know, how they fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.core.errors import DataError
from echelon.training.data.chats.template import ChatTemplate
from tests.training.data.chats.made_tokenizers import turn

ASKED = [turn("user", "a < b?"), turn("assistant", "yes")]


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
