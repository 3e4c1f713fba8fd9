# SPDX-License-Identifier: Apache-2.0
"""A folder as transformers reads it, in float64: its logits, its tensors, its parts.

The folder has the configuration, and the tensors, or the caller gives these by the names of the
class. They are compared with right weights in the same class, put in by our table of names, and the
parts of a text with the independent implementation.

Shape suffixes: T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan
from echelon.proof.independent.hugging_face.beside import (
    PACKAGE,
    PLAIN,
    InFloat64,
    TokensAndLabels,
    Values,
    give_weights,
    loss_and_gradients,
    noted_key,
)
from echelon.proof.independent.parts import SAME, DifferentPart, relative_difference
from echelon.proof.independent.sequence import SequenceRun


@contextmanager
def _without_progress() -> Iterator[None]:
    """Keep the bar of a model that is read off the terminal."""
    bars: Any = import_module(f"{PACKAGE}.utils.logging")
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


class FolderModel:
    """A model of transformers with the configuration and the weights of a folder."""

    def __init__(self, folder: Path, state: Values | None = None) -> None:
        """Read the folder, or its config.json alone where `state` has the tensors of the class.

        OSError, ValueError or RuntimeError where transformers does not take it.
        """
        package: Any = import_module(PACKAGE)
        with torch.random.fork_rng(devices=[]), InFloat64(), _without_progress():
            # transformers renames tensors of files, and of `state`, for its class.
            source: Any = {"state_dict": dict(state)} if state is not None else {}
            reader: Any = package.AutoModelForCausalLM
            if state is not None:
                model = self._configured(folder)
                reader, source["config"] = type(model), model.config
            loaded = reader.from_pretrained(
                None if state is not None else folder,
                dtype=torch.float64,
                output_loading_info=True,
                **source,
                **PLAIN,
            )
            self._model, lacking = loaded[0].eval(), [*loaded[1]["missing_keys"]]
        tied = self._model.config.tie_word_embeddings
        lacking = [
            key for key in lacking if not (tied and key.startswith(("lm_head", "embed_out")))
        ]
        if lacking:
            raise ValueError(f"it lacks {', '.join(sorted(lacking)[:4])}")
        self._folder = folder

    def _configured(self, folder: Path) -> Any:
        package: Any = import_module(PACKAGE)
        config = package.AutoConfig.from_pretrained(folder)
        return package.AutoModelForCausalLM.from_config(config, **PLAIN).double().eval()

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits of a text, [T, V]."""
        with InFloat64():
            return self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]

    def state(self) -> dict[str, torch.Tensor]:
        """Return its tensors, by the names of the class."""
        return dict(self._model.state_dict())

    def given(
        self, shape: ModelShape, weights: Values, biases: Mapping[int, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a model of this class with weights by our names."""
        with torch.random.fork_rng(devices=[]), InFloat64():
            model = self._configured(self._folder)
        give_weights(model, shape, weights, biases)
        return dict(model.state_dict())

    def first_part_unlike(self, plan: Plan, right: SequenceRun) -> DifferentPart | None:
        """Return the first part that transformers computes otherwise than `right` has it."""
        inputs_BT = torch.tensor([right.tokens])
        rows = TokensAndLabels(inputs_BT=inputs_BT, labels_BT=inputs_BT)
        theirs = loss_and_gradients(self._model, plan.model, rows)
        for (unit, part), found_BTX in theirs.parts.items():
            error = relative_difference(
                found_BTX[0], right.parts[noted_key(plan, right.parts, unit, part)]
            )
            if not error <= SAME:
                return DifferentPart(part, unit, f"off by {error:.2g}; all before it agrees")
        return None
