# SPDX-License-Identifier: Apache-2.0
"""A JSON of DeepSpeed that a trainer on top of Hugging Face's Trainer names: what it says here.

https://huggingface.co/docs/transformers/deepspeed. "auto" is what the Trainer says. What the file
says itself must be the same where the Trainer compares it (`fill_match` of
integrations/deepspeed.py in transformers 5): it stops else, so such a key is refused by name.
Of keys that are the file's alone its own are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from echelon.interop.deepspeed.abilities import TABLES
from echelon.interop.deepspeed.read import BATCH, read_clipping, read_rest
from echelon.interop.deepspeed.read_numbers import read_optimizer, read_precision, read_scheduler
from echelon.interop.deepspeed.read_zero import read_activations, read_stage, read_zero
from echelon.interop.followed import adopt, inner_reader
from echelon.interop.hugging_face.trainer_keys import TrainerKeys, halves_on
from echelon.interop.import_context import ImportContext, import_context
from echelon.interop.key_reader import AUTO, KeyReader, json_text

KEY = "deepspeed"
_PRINT = "steps_per_print"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedFile:
    """Read the file that `KEY` names: its stage first, and all else once data ranks are known."""

    reader: KeyReader
    inner: KeyReader
    stage: int

    @classmethod
    def of(cls, reader: KeyReader) -> DeepSpeedFile | None:
        """Return the file, None where there is none or it is not here."""
        inner = inner_reader(reader, KEY, "DeepSpeed")
        if inner is None:
            return None
        inner.sections(TABLES.sections)
        inner.skip(_PRINT, "what the Trainer logs is shown")
        inner.given = {key: value for key, value in inner.given.items() if key != _PRINT}
        return cls(reader=reader, inner=inner, stage=read_stage(inner))

    def read(self, keys: TrainerKeys, data: int, context: ImportContext) -> None:
        """Note what becomes of its keys, after those of the Trainer: they win."""
        inner = self.inner
        # What the Trainer's own keys came to, "auto" among them.
        theirs = self.reader.entries.get("precision.parameters")
        context = replace(context, parameters="fp32" if theirs is None else str(theirs.value))
        named = {k: one for k, one in self.reader.entries.items() if k.startswith("model.")}
        if named:
            # Sizes that follow from the model are those of the file's, not of a base.
            context = replace(context, model=import_context(named, None).model)
        self._match(self._of_trainer(keys, context))
        gradients = read_precision(inner, context, self._added_table(keys))
        read_zero(inner, self.stage, gradients, data, context)
        read_activations(inner)
        read_optimizer(inner)
        read_scheduler(inner)
        read_clipping(inner)
        read_rest(inner)
        inner.finish()
        adopt(self.reader, KEY, inner)

    def _added_table(self, keys: TrainerKeys) -> str:
        """Return the table of the Trainer's half where the file has none: accelerate adds it.

        `set_mixed_precision` of utils/dataclasses.py, accelerate 1.
        """
        half = next((name for name, on in halves_on(self.reader).items() if on), "")
        old = half == "bf16" and self.inner.given.get("bfloat16.enabled") is True
        there = old or self.inner.keys_of(half)
        return "" if there or self.reader.given.get(keys.pure) else half

    def _of_trainer(self, keys: TrainerKeys, context: ImportContext) -> dict[str, _Theirs]:
        """Return what the Trainer compares: of keys of the file its own name and value."""
        given, half = self.reader.given, context.parameters
        micro_size = given.get(keys.micro, keys.default_micro)
        accumulation = given.get(keys.steps, 1)
        rate, betas = self._value("learning_rate"), [self._value(f"beta{n}") for n in (1, 2)]
        clip, rise = self._value("clip_norm"), self._value("warmup_steps")
        steps = self.reader.entries.get("train.steps")
        total, micro, accumulated = BATCH
        found = {
            micro: _Theirs(keys.micro, micro_size),
            accumulated: _Theirs(keys.steps, accumulation),
            "gradient_clipping": _Theirs("max_grad_norm", 0.0 if clip == "none" else clip),
            "optimizer.params.lr": _Theirs("learning_rate", rate),
            "optimizer.params.betas": _Theirs(
                "adam_beta1, adam_beta2", None if None in betas else betas
            ),
            "optimizer.params.eps": _Theirs("adam_epsilon", self._value("eps")),
            "optimizer.params.weight_decay": _Theirs("weight_decay", self._value("weight_decay")),
            "scheduler.params.warmup_max_lr": _Theirs("learning_rate", rate),
            "fp16.enabled": _Theirs("fp16", half == "fp16"),
            "bf16.enabled": _Theirs("bf16", half == "bf16"),
        }
        if context.ranks and isinstance(micro_size, int) and isinstance(accumulation, int):
            # All ranks, those that read the same samples too.
            what = f"ranks x {keys.micro} x {keys.steps}"
            found[total] = _Theirs(what, context.ranks * micro_size * accumulation)
        if steps is not None:
            found["scheduler.params.total_num_steps"] = _Theirs("number of steps", steps.value)
        if isinstance(rise, int):
            found["scheduler.params.warmup_num_steps"] = _Theirs("warm-up", max(1, rise))
        return found

    def _value(self, name: str) -> object:
        """Return a setting of the optimizer that the Trainer's keys came to."""
        entry = self.reader.entries.get(f"optimizer.{name}")
        return entry.value if entry else None

    def _match(self, theirs: Mapping[str, _Theirs]) -> None:
        """Refuse each key at which the Trainer stops; it is read on as if it were "auto"."""
        inner = self.inner
        other = {
            key: one
            for key, one in theirs.items()
            if one.value is not None
            and inner.has(key)
            and not inner.is_auto(key)
            and inner.given[key] != one.value
        }
        for key, one in other.items():
            why = f"the Trainer stops, as its {one.name} is {json_text(one.value)}"
            inner.refuse(key, why, suggestions=('"auto"', json_text(one.value)))
        inner.given = {**inner.given, **dict.fromkeys(other, AUTO)}
        for key in BATCH:
            if key not in other:
                name = (
                    theirs[key].name if key in theirs else "sizes, and as many ranks as there are,"
                )
                inner.skip(key, f"{name} of the Trainer")


@dataclass(frozen=True, slots=True)
class _Theirs:
    """Hold what the Trainer calls a value of the file, and has for it; None where it says none."""

    name: str
    value: object
