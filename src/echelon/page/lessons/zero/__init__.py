"""Lessons about shares of model state.

stages.py           what a rank holds and sends at each stage of ZeRO
"""
