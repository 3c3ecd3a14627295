"""How a put gets in and onto the disk: limits and waiting for room, group commit, syncs, and the end of a queue."""
