"""Damaged and forged files."""
