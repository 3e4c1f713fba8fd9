"""Seconds of what goes over links.

collectives  one collective over the tiers of a cluster
algorithms   sums of gradients, by the algorithm that makes them
exchanges    what a block sends, and what of it shows
"""
