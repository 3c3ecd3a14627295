"""All harnesses for hours; what they saw goes into a ledger."""
