"""The guide page of the families of models that are read, out of their table."""

from __future__ import annotations

from echelon.config.model.architectures.table import ARCHITECTURES, NOT_COMPUTED

_HEAD = """# Families of models

Written by `python -m tests.docs.doc_pages` out of `src/echelon/config/model/architectures/`.

A stock `config.json` of these families is read as it is: the model is planned, trained, split and
proven, its weights are loaded, and
[leave again](to-hugging-face.md).

```toml
[model]
hf_config = "phi-4/config.json"
```

| models | model_type | what of their blocks is taken |
|---|---|---|
"""

_TAIL = """
What a family has beside what stands there is refused by name: another kind of stretched positions,
a window of some layers, ALiBi. Each is
compared with `transformers` in float64: logits, loss and the gradient of every weight of small
models (`tests/config/model/architectures/test_llama.py`); every kind of block is proven in each
split, bytes included (`tests/walks/matrix/block_cases.py`); and a small `config.json` of each
family is proven over two data, two tensor and two pipeline ranks, with the sequence split
(`tests/config/model/architectures/test_table.py`).

## How the parts are said

- **`model.rotary.fraction`**: of a head the first dims turn with the position, all others pass.
  Here the dims that turn come first in each half of a
  head; files have another order, and rows are put in theirs when weights come and go.
  `rotary.interleaved` says that files keep pairs side by side,
  `rotary.none_every = 4` that each fourth block turns nothing.
- **`model.multipliers`**: factors of token vectors (Gemma, Granite), of what a branch adds to the
  stream, and of logits. `model.attention_scale` is what
  the product of a query and a key is multiplied by, in place of 1 / sqrt(head_dim).
- **`model.norm_place`**: norms before a branch (`"before"`), after it (OLMo 2), or both (GLM 4).
  `model.residual = "parallel"`: attention and MLP read
  the same stream, each through a norm of its own or both through one.
- **`model.norm_offset = 1.0`**: files of Gemma keep 1 less than what multiplies. Here a norm has
  what multiplies; the difference is put in and taken
  out on the way.
- **`model.qk_norm_over = "width"`**: queries and keys are normed over all heads together. Tensor
  ranks have parts of the heads, so they sum two numbers of each token in each pass.

## A family that is not known

A `config.json` whose `model_type` stands in neither list is planned as a decoder like Llama, where
its keys say how large it is: layers, width, heads, inner width, vocabulary and positions.
`echelon plan` then lists what is assumed, and each key that it does not understand: in its text, as
`assumed` with `--json`, and on its page; the note `assumed-model` warns of it. A setting of
`[model]` that you write takes the place of what is assumed.

Such a model is planned and searched for, and its split is proven. To train it, or to start from its
weights, say that what is assumed is so:

```toml
[model]
hf_config = "new-model/config.json"
gated = false                          # what is otherwise
assume = true                          # the rest is so
```

A part that makes it another kind of model is refused by name: images, sound, an encoder, experts,
latent attention, blocks with a state.

## What is not computed

"""


def families_page() -> str:
    """Return the page."""
    rows = [f"| {one.models} | `{kind}` | {one.taken} |" for kind, one in ARCHITECTURES.items()]
    missing = [f"- `{kind}`: {why}." for kind, why in NOT_COMPUTED.items()]
    return _HEAD + "\n".join(rows) + "\n" + _TAIL + "\n".join(missing) + "\n"
