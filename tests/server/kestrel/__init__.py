"""The kestrel server: its parsers, its protocols, its queues and its command."""
