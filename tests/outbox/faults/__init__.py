"""The table of faults that an outbox must survive: kills, restarts, overlaps, interrupts, clocks and full disks."""
