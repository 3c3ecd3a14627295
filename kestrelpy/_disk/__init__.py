"""The disk seam: files, folders and locks, as everything above sees them. No other folder touches the operating system.

``interface`` has the protocols. ``real`` and ``file`` implement them on the operating system, ``memory`` in memory.
"""
