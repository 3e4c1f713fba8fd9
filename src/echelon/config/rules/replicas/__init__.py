"""Rules about replicas that do not sum gradients over ranks: islands, servers, threads."""
