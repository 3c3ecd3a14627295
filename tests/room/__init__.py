"""The room on the disk that a queue may take: kept segments, the journal's limit, readers that are too far behind."""
