"""Lines of waiters, and futures."""
