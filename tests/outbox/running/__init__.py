"""Tests of running outboxes."""
