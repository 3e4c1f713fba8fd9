# SPDX-License-Identifier: Apache-2.0
"""ZB-H1, ZB-H2 and ZB-V: a split backward pass fills the bubble.

Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), sections 2.1 and 2.2, figure 3.
Only B is on the way to the previous rank; W may be run whenever there is time. Rank r starts r
forward passes later than rank 0, so its first gradient comes earlier: it runs fewer forward passes
before that, leaves as many weight gradients for the end, and every rank holds equally many
microbatches. ZB-H1 has 1F1B's activation memory and a third of its bubble; with ZB-H2 no rank waits
once it has started, for up to twice that memory.

ZB-V, section 6 of the same paper: no rank waits once it has started, with 1F1B's activation memory.
The same schedule is V-ZB of Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv
2405.15362).
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from types import MappingProxyType

from echelon.schedule.action import Action, ActionKind
from echelon.schedule.builders.builder import EQUAL_TIMES, ActionTimes, Builder, VShaped


class ZeroBubbleH(Builder):
    """Build a handcrafted zero-bubble schedule that keeps `in_flight` microbatches on each rank.

    `in_flight` is from p (ZB-H1) to 2p-1 (ZB-H2).
    """

    @abstractmethod
    def in_flight(self) -> int:
        """Return how many microbatches each rank holds when the pipeline is full."""

    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """Return the warm-up forwards, then F, B (and W of an earlier B) in turn, then the rest.

        The first rank has no W left to run late, the last has all but one.
        """
        last = self.num_ranks - 1
        warm_up = min(2 * (last - rank), self.in_flight() - 1 - rank)
        late = self.in_flight() - 1 - warm_up
        actions = [Action(ActionKind.F, rank, microbatch) for microbatch in range(warm_up)]
        for microbatch in range(self.num_microbatches):
            if warm_up + microbatch < self.num_microbatches:
                actions.append(Action(ActionKind.F, rank, warm_up + microbatch))
            actions.append(Action(ActionKind.B, rank, microbatch))
            if microbatch >= late:
                actions.append(Action(ActionKind.W, rank, microbatch - late))
        started = max(0, self.num_microbatches - late)
        actions.extend(
            Action(ActionKind.W, rank, microbatch)
            for microbatch in range(started, self.num_microbatches)
        )
        return tuple(actions)

    def idle_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return the largest of what filling, draining and waiting for gradients take.

        (p-1) F: the last rank waits for its first microbatch.
        (p-1) B - e F: rank 0 waits for its first gradient, with e = in_flight - p more forwards.
        (p-1)(F+B) - (p-1+e) W: rank 0 drains, and has so many W fewer left than a round trip lasts.
        """
        hops = self.num_ranks - 1
        extra = self.in_flight() - self.num_ranks
        forward, backward = times.forward_s, times.input_gradient_s
        return max(
            hops * forward,
            hops * backward - extra * forward,
            hops * (forward + backward) - (hops + extra) * times.weight_gradient_s,
        )

    def peak_in_flight(self, stage: int) -> int:
        """Return the microbatches in flight, equal on all ranks."""
        del stage
        return self.in_flight()


class ZeroBubbleH1(ZeroBubbleH):
    """Build ZB-H1: p microbatches in flight on every rank."""

    name = "zb-h1"
    paper = "Qi et al. 2023, Zero Bubble, arXiv 2401.10241, section 2.1"
    suits = "1f1b's activations fit, nothing more; W fills what 1f1b idles"
    closed_forms = "echelon.cost.inputs.pipeline:ZB_H1"

    def in_flight(self) -> int:
        """Return p, as 1F1B has on its first rank."""
        return self.num_ranks

    def paper_bubble_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p-1)(F+B-W), as in section 2.3, table 2.

        There it is the longest wait of a rank between its own first start and its own last end.
        """
        # Exact where F >= W. If B >= W too, it is the wait of the step.
        work = times.forward_s + times.input_gradient_s - times.weight_gradient_s
        return (self.num_ranks - 1) * work


class ZeroBubbleH2(ZeroBubbleH):
    """Build ZB-H2: 2p-1 microbatches in flight on every rank, or all of them if they are fewer.

    Each microbatch in flight beyond p fills one more gap of ZB-H1; with m = p it is ZB-H1.
    """

    name = "zb-h2"
    paper = "Qi et al. 2023, Zero Bubble, arXiv 2401.10241, section 2.2"
    suits = "activations are cheap: up to 2p-1 microbatches are held"
    closed_forms = "echelon.cost.inputs.pipeline:ZB_H2"

    def in_flight(self) -> int:
        """Return min(m, 2p-1)."""
        return min(self.num_microbatches, 2 * self.num_ranks - 1)

    def paper_bubble_s(self, times: ActionTimes = EQUAL_TIMES) -> float:
        """Return (p-1)(F+B-2W), as in section 2.3, table 2.

        There it is the longest wait of a rank between its own first start and its own last end.
        Over the whole step a rank also waits for the others to start or to end: `idle_s`.
        """
        # Exact where m >= 2p-1, F >= W and F + B >= 2W.
        work = times.forward_s + times.input_gradient_s - 2 * times.weight_gradient_s
        return (self.num_ranks - 1) * work


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
