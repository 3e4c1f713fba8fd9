# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism for any module whose blocks are a chain.

build     `apply_pipeline`: what is done to a module, in order
chain     the calls of blocks, and who handles them
trace     one forward, followed: which block is called when, who uses which parameter
check     each stage run alone, and compared with the whole
stage     one stage: its own forward, entered and left at blocks
passes    gradients and parameters, action by action
linear    weight gradients that a schedule puts off
"""
