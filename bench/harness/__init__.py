"""What every comparison shares: modes and cases, hosts and ranks that take turns, verdicts."""
