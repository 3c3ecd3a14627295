"""The report of the load that the items of a queue show: figures, charts, one page.

``load_report`` is what users call. ``load`` computes the figures in Spark, ``charts`` draws them, ``page`` writes the
HTML page.
"""
