"""A small tokenizer with a chat template, as a folder of Hugging Face, made without a download."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from echelon.training.data.beside_weights import tokenizer_files
from echelon.training.data.tokenizer import train_tokenizer

MARKED = """\
{%- for message in messages %}
{{- '<|' ~ message.role ~ '|>\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{%- else %}
{{- message.content ~ '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}
"""
PLAIN = """\
{%- for message in messages %}
{{- '<|' ~ message.role ~ '|>\\n' ~ message.content }}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}
"""
FORGETFUL = "{{ messages[-1].content }}"
"""A template that writes the last message alone."""

Record = Mapping[str, object]


def turn(role: str, content: str) -> dict[str, str]:
    """Return one message."""
    return {"role": role, "content": content}


CHATS: Sequence[Record] = (
    {"messages": [turn("user", "What is 2 + 2?"), turn("assistant", "It is 4, of course.")]},
    {
        "messages": [
            turn("system", "Be brief."),
            turn("user", "Name a colour: gr\u00fcn or rot?"),
            turn("assistant", "gr\u00fcn \U0001f33f"),
            turn("user", "And the other?"),
            turn("assistant", "rot"),
        ]
    },
)
PAIRS: Sequence[Record] = (
    {"prompt": "The sky is", "completion": " blue."},
    {"prompt": "One, two,", "completion": " three"},
)
TURNS: Sequence[Record] = (
    {
        "prompt": [turn("system", "Be brief."), turn("user", "What is 2 + 2?")],
        "completion": [turn("assistant", "4")],
    },
)


def tokenizer_folder(folder: Path, template: str) -> Path:
    """Write a tokenizer of 384 ids, with a template beside it."""
    words = ("What is the colour of the sky? It is blue, of course. Be brief and name the other. ",)
    made = train_tokenizer("bpe-384", iter(words * 40))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in tokenizer_files(made, 1024).items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def write_records(path: Path, records: Sequence[Record]) -> Path:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
