"""Files that an earlier release wrote."""
