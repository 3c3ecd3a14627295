"""Group commit, syncs, backpressure."""
