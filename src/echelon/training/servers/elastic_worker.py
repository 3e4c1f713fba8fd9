# SPDX-License-Identifier: Apache-2.0
"""A worker of a run that goes on without it: it comes in where the servers let it, at any time."""

from __future__ import annotations

from echelon.launch.context import RankContext
from echelon.parallel.servers.links import PairLinks
from echelon.training.servers.worker import AsynchronousWorker


class ElasticWorker(AsynchronousWorker):
    """Take steps from the one on that the servers say."""

    def join(self, context: RankContext, message_s: float) -> int | None:
        """Meet the servers, take their parameters, and return the steps that are done.

        None where the run is over.
        """
        recorder = self.groups.recorder
        links = PairLinks(
            plan=self.plan, store=context.store, recorder=recorder, message_s=message_s
        )
        with recorder.waiting("the servers"):
            self.messages.pairs = links.meet_servers(context.attempt)
            reply = self.messages.join(context.attempt, self.model.buckets)
        self._hear(reply.stop_after)
        return None if reply.loss < 0 else int(reply.loss)

    def _hear(self, news: int) -> None:
        """Pass on what the first server says last: where to stop, or where all meet."""
        self._stop_after = news
