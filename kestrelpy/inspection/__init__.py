"""Looking at queues without a lock: ``scan`` their items, ``verify`` their files, ``inspect`` what they hold."""
