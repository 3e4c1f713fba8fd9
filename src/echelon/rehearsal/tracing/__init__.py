# SPDX-License-Identifier: Apache-2.0
"""Traces of rehearsed ranks.

step_log   what a rank does in a step, one thing after the other
traces     the same on a time axis, as a Chrome trace for each rank
"""
