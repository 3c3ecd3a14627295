"""One queue, its writer and its readers, which get killed; and the proof that nothing was lost: ``kestrelpy demo``."""
