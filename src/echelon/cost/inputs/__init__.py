# SPDX-License-Identifier: Apache-2.0
"""Numbers that every formula reads of a model, a machine, a layout and a trainer.

numbers      a model, a machine and a layout, as numbers or arrays of plans; tools for such records
cost_inputs  facts of a trainer, and the bundle of all four; terms of a result; links of a group
pipeline     closed forms of schedules: seconds that ranks wait, microbatches in flight
"""
