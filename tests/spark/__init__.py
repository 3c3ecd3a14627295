"""PySpark: reading, writing, the driver buffer, the lake, the report."""
