"""What items say about a load: figures, charts, one page."""
