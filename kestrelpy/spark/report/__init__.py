"""The report of the load that the items of a queue show: figures, charts, one page."""
