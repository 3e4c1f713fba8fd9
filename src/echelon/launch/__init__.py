"""Start ranks, watch them, end them together, and say which one failed first."""
