"""The demo of the outbox: a shop and its mailers, killed meanwhile, and a proof. ``make demo-outbox``."""
