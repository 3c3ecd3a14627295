"""A KeyboardInterrupt, or a failed allocation, at every place of an operation."""
