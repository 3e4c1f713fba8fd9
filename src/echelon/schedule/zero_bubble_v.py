# SPDX-License-Identifier: Apache-2.0
"""ZB-V: no rank waits once it has started, with 1F1B's activation memory.

Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 6; the same schedule is
V-ZB of Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362).
"""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType

from echelon.schedule.action import Action, ActionKind
from echelon.schedule.builder import EQUAL_TIMES, ActionTimes, VShaped


class ZeroBubbleV(VShaped):
    """Build ZB-V. Of fewer than 2p-1 microbatches, the places of the missing ones are left out."""

    name = "zb-v"
    paper = "Qi et al. 2023, Zero Bubble, arXiv 2401.10241, section 6"
    suits = "W is about as long as F and B; the embedding and the head share rank 0"
    closed_forms = "echelon.cost.inputs.pipeline:ZB_V"
    ends_on_first_rank = True
    tool_names = MappingProxyType({"torchtitan": "ZBVZeroBubble"})

    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return the forwards before the first gradient, the steady cycle, and the late W.

        In letters, small ones on the stage on the way back: (2 (p-rank) - 1) F, rank times f F,
        (p-rank) times f b w, the cycle F B W f b w, rank times B b, (p-rank) times B W, and what
        is left of w and W. The cycle ends without F where there are no more forward passes.
        """
        stages, rest = {"down": rank, "back": self.num_stages - 1 - rank}, self.num_ranks - rank
        total = max(self.num_microbatches, 2 * self.num_ranks - 1)
        done: Counter[str] = Counter()
        actions: list[Action] = []

        def run(words: str, times: int = 1) -> None:
            """Add the next action of each word; "F" is down, "f" is back."""
            for word in words * times:
                kind = ActionKind(word.upper())
                stage = stages["down" if word.isupper() else "back"]
                actions.append(Action(kind, stage, done[word]))
                done[word] += 1

        run("F", 2 * rest - 1)
        run("fF", rank)
        run("fbw", rest)
        while done["f"] < total:
            run("F" * (done["F"] < total) + "BWfbw")
        run("Bb", rank)
        run("BW", rest)
        run("w", total - done["w"])
        run("W", total - done["W"])
        return tuple(one for one in actions if one.microbatch < self.num_microbatches)

    def idle_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p-1) F for F = B = W and m >= 2p-1; F, B and W are those of one of 2p stages.

        Other times make other chains of actions the longest; no paper states them, and they are
        the longest paths of the list above. With m < 2p-1 and F = B = W rank 0 lacks
        2 (2p-1-m) actions while it waits for its first gradient.
        """
        hops = self.num_ranks - 1
        if hops == 0:
            return 0
        f, b, w = times.forward_s, times.input_gradient_s, times.weight_gradient_s
        missing = max(0, 2 * self.num_ranks - 1 - self.num_microbatches)
        return max(
            2 * missing * f,
            hops * b,
            f + (hops - 1) * w,
            b + (hops - 1) * w,
            2 * hops * (b - w),
            (2 * hops - 1) * f - (hops - 1) * b,
            (2 * hops - 1) * f + b - 2 * hops * w,
            2 * hops * f - hops * b - w,
            2 * hops * f - (2 * hops + 1) * w,
        )

    def closed_form_holds(self, times: ActionTimes = EQUAL_TIMES) -> bool:
        """Return whether m >= 2p-1 or F = B = W."""
        return times.are_equal or self.num_microbatches >= 2 * self.num_ranks - 1

    def paper_bubble_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return 0: no rank waits between its own first start and its own last end."""
        del times  # exact where F = B = W and m >= 2p-1
        return 0

    def peak_in_flight(self, stage: int) -> int:
        """Return min(m, 2p - stage)."""
        return min(self.num_microbatches, self.num_stages - stage)

    def peak_in_flight_of_rank(self, rank: int) -> int:
        """Return min(2p, m + 1 + rank): 2p half-stages, which is p microbatches of a whole rank."""
        return min(self.num_stages, self.num_microbatches + 1 + rank)
