"""Random programs of calls against a model (hypothesis)."""
