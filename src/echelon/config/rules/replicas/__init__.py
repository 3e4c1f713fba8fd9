"""Rules about replicas that do not sum gradients over ranks in each step: islands, servers, threads."""
