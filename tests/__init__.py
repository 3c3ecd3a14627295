"""The tests. README.md says which folder asks what."""
