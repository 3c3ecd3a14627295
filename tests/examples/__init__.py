"""The cookbook."""
