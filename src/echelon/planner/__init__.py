"""Choose how to split a run: enumerate, estimate, rank, explain, and write for other trainers."""
