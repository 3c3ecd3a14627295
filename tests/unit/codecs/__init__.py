"""Codecs that need a package each: declared types, compression, encryption."""
