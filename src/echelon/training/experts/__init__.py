# SPDX-License-Identifier: Apache-2.0
"""Experts in training.

balance.py   the balance as a part of each step, and as checkpoints know it
"""
