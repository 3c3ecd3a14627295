"""Who waits, for what: the line of a queue or a reader, and the futures of puts."""
