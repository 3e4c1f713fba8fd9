"""The decoder, written once and unaware of ranks, and the operations that it is made of."""
