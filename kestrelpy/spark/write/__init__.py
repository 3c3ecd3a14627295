"""Writes rows into queues, through their inboxes. ``sink`` is what Spark calls, in batches and streams."""
