# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism for any module.

rules       the words of rules, what they name, and those of a model of transformers
split       what each rank holds, or why a module cannot be cut
experts     stacks of experts, some on each rank
layers      layers that work on their pieces, in the place of the module's own
ranks       what tensor ranks must agree on in the first step
apply       the order of all this; rules from one forward pass, which are to be proven
"""
