# SPDX-License-Identifier: Apache-2.0
"""Rules about the search for a schedule."""

from echelon.core.rules import Rule

SCHEDULE_SEARCH_HAS_MEMORY = Rule(
    id="schedule-search-has-memory",
    why="""
    `most_in_flight` is the most (stage, microbatch) pairs whose activations one rank may hold. A
    microbatch comes back to a rank only after it has crossed all later stages, so just before its
    first backward pass there the rank holds it once for each of its stages, whatever the order.
    With a lower limit no schedule exists.
    """,
    example="""
    [mesh]
    pp = 2
    [pipeline]
    schedule = "auto"
    virtual_stages = 2
    %s
    """,
    bad="most_in_flight = 1          # each rank has 2 stages",
    fixed="most_in_flight = 2",
)
