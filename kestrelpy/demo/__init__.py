"""Programs that show the library in use, kill its processes meanwhile, and prove the totals at the end.

``queue`` is the program of ``kestrelpy demo`` (``make demo``). ``pipeline`` is the same with Spark (``make pipeline``).
"""
