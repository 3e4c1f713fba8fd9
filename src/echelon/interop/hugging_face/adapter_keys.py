# SPDX-License-Identifier: Apache-2.0
"""Keys of trainers about adapters that PEFT keeps -> [lora]: rank, scale, which layers, dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from echelon.core.choices.lora import ALL_LINEAR, LINEARS, LORA_LINEARS
from echelon.interop.key_reader import COUNT, KeyReader

_LAYERS = {
    **{f"{name}_proj": name for name in LINEARS},
    "q_a_proj": "q_down",
    "kv_a_proj_with_mqa": "kv_down",
    "q_b_proj": "q_up",
    "kv_b_proj": "kv_up",
}
"""Our name of each layer of transformers, those of latent attention behind the others."""
_EVERY = ("all", ALL_LINEAR)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterKeys:
    """Name the keys of a trainer that say what adapters are like."""

    rank: str
    """Their width."""
    alpha: str
    """They are scaled by this over the width."""
    targets: str
    """Which layers have one: a list, or words with commas."""
    dropout: str
    """Of what an adapter reads."""
    rslora: str
    """Whether the scale is over the root of the width."""
    folder: str = ""
    """The folder that they begin as, of PEFT; "": there is no such key."""
    every: str = ""
    """Whether each linear layer has one; "": there is no such key."""
    default_rank: int | None = None
    """The width where none is given, of which the scale is twice; None: both must be."""

    def skip(self, reader: KeyReader, why: str) -> None:
        """Say why these keys need no setting: there are no adapters."""
        names = (self.rank, self.alpha, self.targets, self.dropout, self.rslora)
        names += (self.folder, self.every)
        reader.skip_all([name for name in names if name], why)


def read_adapters(reader: KeyReader, keys: AdapterKeys) -> None:
    """Map adapters over a frozen model; what they are is asked for where nothing says it."""
    rank = reader.integer(keys.rank, COUNT, setting="lora.rank") or keys.default_rank
    if rank is None:
        reader.refuse(keys.rank, "adapters have a width", suggestions=(f"{keys.rank}: 8",))
    else:
        reader.set_or_default(keys.rank, "lora.rank", rank, "width of adapters")
    alpha = reader.number(keys.alpha, setting="lora.alpha")
    if alpha is None and rank is not None and keys.default_rank is not None:
        alpha = 2.0 * rank
    if alpha is None:
        reader.refuse(keys.alpha, "adapters have a scale", suggestions=(f"{keys.alpha}: 16",))
    else:
        reader.set_or_default(keys.alpha, "lora.alpha", float(alpha), "adapters are scaled by it")
    if keys.every and reader.flag(keys.every, setting="lora.targets"):
        reader.set(keys.every, "lora.targets", ALL_LINEAR, "layers with an adapter")
        reader.skip(keys.targets, f"{keys.every} says it")
    else:
        _read_targets(reader, keys.targets)
        if keys.every:
            reader.skip(keys.every, f"{keys.targets} says it")
    reader.only(keys.dropout, (0, 0.0), "adapters read without dropout", setting="lora.dropout")
    if reader.flag(keys.rslora, setting="lora.rslora"):
        reader.set(keys.rslora, "lora.rslora", True, "the scale is over the root of the width")
    else:
        reader.skip(keys.rslora, "the scale is over the width")
    if keys.folder and reader.has(keys.folder):
        _read_folder(reader, keys.folder)


def _read_folder(reader: KeyReader, key: str) -> None:
    given = reader.given[key]
    listed = cast("list[object]", given) if isinstance(given, list) else str(given).split(",")
    folders = [str(name).strip() for name in listed]
    if len(folders) == 1:
        reader.set(key, "train.adapters", folders[0], "what adapters begin as")
    else:
        reader.refuse(key, "a run begins with one set of adapters", suggestions=folders[-1:])


def _read_targets(reader: KeyReader, key: str) -> None:
    why = "layers with an adapter"
    if not reader.has(key):
        reader.set_or_default(key, "lora.targets", ALL_LINEAR, why)
        return
    given = reader.given[key]
    names = given.split(",") if isinstance(given, str) else given
    found = [str(name).strip() for name in cast("list[object]", names)] if names else []
    if any(name in _EVERY for name in found):
        reader.set(key, "lora.targets", ALL_LINEAR, why)
        return
    wanted = {_LAYERS[name] for name in found if name in _LAYERS}
    if len(wanted) != len(found):
        known = list(_LAYERS)
        reader.refuse(
            key, "adapters stand beside linear layers of blocks", suggestions=(", ".join(known),)
        )
        return
    reader.set(key, "lora.targets", [name for name in LORA_LINEARS if name in wanted], why)
