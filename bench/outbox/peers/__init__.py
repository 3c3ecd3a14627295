"""Queues of jobs behind one interface (``base.Peer``): ours, the floor, and other people's."""
