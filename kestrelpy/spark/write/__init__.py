"""Writing rows into queues, through their inboxes."""
