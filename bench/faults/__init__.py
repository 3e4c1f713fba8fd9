"""Ranks that are killed or stopped at random moments: of runs, and of saving."""
