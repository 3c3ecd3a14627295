"""One suite for every blocking queue, and the tests of CPython's own queues."""
