"""Log records in a durable queue: their JSON, the handler, the listener, and what brings records from elsewhere."""
