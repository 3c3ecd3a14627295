"""One module of the library at a time, in folders that mirror it."""
