"""The use explorer: every option with every other, as users would, against a model."""
