"""Waiting: the line of a queue or a reader, the waiters in it, and the futures of puts."""
