# SPDX-License-Identifier: Apache-2.0
"""Lessons about mixtures of experts.

travel.py           tokens go to their experts and back, as four ranks recorded it
"""
