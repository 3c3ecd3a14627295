"""The write side of a queue: limits, backpressure, group commit, syncs, maintenance, and closing."""
