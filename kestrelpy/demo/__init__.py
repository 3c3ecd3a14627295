"""Programs that show the library at work, kill its processes on the way, and prove the totals at the end.

``queue`` is what ``kestrelpy demo`` runs (``make demo``), ``pipeline`` the same with Spark (``make pipeline``).
"""
