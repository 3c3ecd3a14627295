"""The benchmarks: that they run, and count rightly."""
