"""The proof that a plan computes what one device computes."""
