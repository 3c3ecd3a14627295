"""Reading queues into Spark: in one go, and as a streaming query. Planned in the driver, read by executors."""
