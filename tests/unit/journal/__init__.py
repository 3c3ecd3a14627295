"""Frames, segments, checkpoints, recovery."""
