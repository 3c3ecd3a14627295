"""Faults of other queues and of this one, each as a test that fails where the fault is planted."""
