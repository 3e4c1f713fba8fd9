"""torch's own compositions as subjects of a proof: the plain decoder, split by torch."""
