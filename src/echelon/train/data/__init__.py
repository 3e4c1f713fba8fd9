"""Turn text into memory-mapped token shards, and read the same samples under every layout."""
