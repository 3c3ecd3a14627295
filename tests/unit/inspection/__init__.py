"""Scan, verify, inspect."""
