# SPDX-License-Identifier: Apache-2.0
"""Rules of chats: records of messages, templates that write them as text, answers that count."""

from echelon.core.rules import Rule

DATA_CHAT_RECORD = Rule(
    id="data-chat-record",
    why="""
    A line of a file of chats is {"messages": [{"role": ..., "content": ...}, ...]}, or
    {"prompt": ..., "completion": ...}, both of them text or both lists of messages. Roles are
    system, developer, user, assistant and tool. A template passes over a role that it does not
    know, or writes it as something else: a misspelt one would change the data without a word.
    """,
    bad='{"messages": [{"role": "human", "content": "2 + 2?"}]}',
    fixed='{"messages": [{"role": "user", "content": "2 + 2?"}, '
    '{"role": "assistant", "content": "4"}]}',
)

DATA_CHAT_TEMPLATE = Rule(
    id="data-chat-template",
    why="""
    A model answers in the form that it was trained on, and the template that comes with the
    tokenizer writes that form: chat_template.jinja beside the tokenizer.json, or chat_template in
    its tokenizer_config.json. Without one, or where it fails, there is no text to train on. A model
    that never saw chats has none: put one beside its tokenizer.
    """,
    bad="echelon data prepare chats.jsonl --format chat --tokenizer bytes --out tokens",
    fixed="echelon data prepare chats.jsonl --format chat --tokenizer base --out tokens     "
    "# base/tokenizer.json, base/chat_template.jinja",
)

DATA_CHAT_PREFIX = Rule(
    id="data-chat-prefix",
    why="""
    A template can mark what the model writes by {% generation %} ... {% endgeneration %}. Where it
    does not, an answer is what a chat has more with it than without it. That needs a template that
    writes the first messages alone as it writes them at the head of a longer chat; one that drops
    the reasoning of earlier answers, say, does not, and the answer cannot be found.
    """,
    bad="{% for m in messages %}{% if not loop.last %}...{% endif %}{% endfor %}",
    fixed="{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}",
)

DATA_ANSWERS_TOLD = Rule(
    id="data-answers-told",
    why="""
    With data.train_on = "answers" only the tokens of answers count in the loss. Chats that were
    prepared as such tell them apart by a bit for each token; text does not.
    """,
    bad="echelon data prepare book.txt --out tokens\n"
    "echelon train run.toml --set data.source=tokens --set data.train_on=answers",
    fixed="echelon data prepare chats.jsonl --format chat --tokenizer base --out tokens\n"
    "echelon train run.toml --set data.source=tokens --set data.train_on=answers",
)

DATA_ANSWERS_COUNTED = Rule(
    id="data-answers-counted",
    why="""
    The loss is the mean over the tokens of answers. Where there is no answer in the chats, or none
    in the part that is held out, there is nothing to take the mean of.
    """,
    bad='{"messages": [{"role": "user", "content": "2 + 2?"}]}',
    fixed='{"messages": [{"role": "user", "content": "2 + 2?"}, '
    '{"role": "assistant", "content": "4"}]}',
)
