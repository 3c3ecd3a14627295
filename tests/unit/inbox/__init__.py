"""Publishing and ingesting."""
