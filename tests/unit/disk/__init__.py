"""The disk seam and what is behind it."""
