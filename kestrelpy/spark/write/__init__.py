"""Writes rows into queues, through their inboxes."""
