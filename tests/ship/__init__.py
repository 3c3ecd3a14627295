"""Tests of ``kestrelpy.ship``."""
