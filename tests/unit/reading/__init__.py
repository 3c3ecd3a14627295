"""Readers, in this process and in another."""
