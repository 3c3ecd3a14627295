"""The outbox on a work queue."""
