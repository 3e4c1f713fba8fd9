# SPDX-License-Identifier: Apache-2.0
"""Seconds of what goes over links.

collectives  one collective over the tiers of a cluster, sums by algorithm
exchanges    what a block sends, and what of it shows
"""
