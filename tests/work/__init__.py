"""Work queues."""
