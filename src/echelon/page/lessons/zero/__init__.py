# SPDX-License-Identifier: Apache-2.0
"""Lessons about shares of model state.

sharding.py         parameters stored again on each rank, or once over all
breakdown.py        where each byte of a rank comes from, at each stage of ZeRO
stages.py           what a rank holds and sends at each stage, for any size and degree
"""
