"""``kestrelpy demo``: one queue, a writer and readers that are killed, and the proof that nothing was lost."""
