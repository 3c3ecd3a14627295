"""The fake disks and clocks that users may test with."""
