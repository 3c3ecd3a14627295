"""Threads under a deterministic scheduler: a seed decides what runs next."""
