"""Real threads and real time: races, a thousand queues."""
