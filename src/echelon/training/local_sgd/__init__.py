# SPDX-License-Identifier: Apache-2.0
"""Local SGD: what islands send each other, and what they make of it.

`outer_steps.py`      when fragments meet, and when their outer step is taken
`elastic_steps.py`    the same among islands that may be lost
`elastic_engine.py`   a rank of such an island
`absences.py`         what such islands missed
`quantised.py`        what is sent in 8 bits
`outer_optimizer.py`  the outer step itself: plain SGD, or with Nesterov's momentum
"""

from echelon.training.local_sgd.outer_steps import OuterSteps

__all__ = ["OuterSteps"]
