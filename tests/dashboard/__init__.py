"""Tests of ``kestrelpy dashboard``: over HTTP, and in a real headless Chromium."""
