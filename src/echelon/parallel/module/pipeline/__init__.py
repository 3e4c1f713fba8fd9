# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism for any module whose blocks are a chain.

build     `apply_pipeline`: what is done to a module, in order; the check of each stage
chain     the calls of blocks, who handles them, and who uses which parameter
stage     one stage: its own forward, entered and left at blocks
passes    gradients and parameters, action by action
"""
