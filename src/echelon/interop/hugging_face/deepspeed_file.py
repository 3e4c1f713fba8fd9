"""A JSON of DeepSpeed that a trainer on top of Hugging Face's Trainer names: what it says here.

https://huggingface.co/docs/transformers/deepspeed. "auto" is what the Trainer says. Sizes of a
batch that are numbers must be those of the Trainer, which stops else. Of other keys that are
numbers the file's are taken, where the Trainer may stop, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.interop.deepspeed.abilities import TABLES
from echelon.interop.deepspeed.read import BATCH, read_clipping, read_rest
from echelon.interop.deepspeed.read_optimizer import read_optimizer, read_scheduler
from echelon.interop.deepspeed.read_precision import read_precision
from echelon.interop.deepspeed.read_zero import read_activations, read_stage, read_zero
from echelon.interop.followed import adopt, inner_reader
from echelon.interop.hugging_face.trainer_keys import TrainerKeys
from echelon.interop.import_context import ImportContext, import_context
from echelon.interop.key_reader import KeyReader

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
        self._read_batch(keys)
        gradients = read_precision(inner, context)
        read_zero(inner, self.stage, gradients, data, context)
        read_activations(inner)
        read_optimizer(inner)
        read_scheduler(inner)
        read_clipping(inner)
        read_rest(inner)
        inner.finish()
        adopt(self.reader, KEY, inner)

    def _read_batch(self, keys: TrainerKeys) -> None:
        total, *sizes = BATCH
        self.inner.skip(total, "it follows from the sizes that the Trainer has, and the ranks")
        for key, name in zip(sizes, (keys.micro, keys.steps), strict=True):
            theirs = self.reader.given.get(name, 1)
            same = self.inner.is_auto(key) or self.inner.given.get(key) == theirs
            if same:
                self.inner.skip(key, f"{name} of the Trainer")
            elif self.inner.has(key):
                why = f"the Trainer stops, as its {name} is {theirs}"
                self.inner.refuse(key, why, suggestions=('"auto"', str(theirs)))
