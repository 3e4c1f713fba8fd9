# SPDX-License-Identifier: Apache-2.0
"""ZB-H1 and ZB-H2: 1F1B with a split backward pass and a fixed number of microbatches in flight.

Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), sections 2.1 and 2.2, figure 3.
Only B is on the way to the previous rank; W may be run whenever there is time. Rank r starts r
forward passes later than rank 0, so its first gradient comes earlier: it runs fewer forward passes
before that, leaves as many weight gradients for the end, and every rank holds equally many
microbatches. ZB-H1 has 1F1B's activation memory and a third of its bubble; with ZB-H2 no rank waits
once it has started, for up to twice that memory.
"""

from __future__ import annotations

from abc import abstractmethod

from echelon.schedule.action import Action, ActionKind
from echelon.schedule.builder import EQUAL_TIMES, ActionTimes, Builder


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
