"""Crash states: every state that a kill or a power cut may leave on a simulated disk."""
