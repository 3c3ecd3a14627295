"""Real processes, file systems and system calls: killed, filled and failed."""
