"""The queues in memory."""
