"""What tests of more than one folder share: disks, paths, patience, budgets. Type-checked."""
