"""Files in and out: atomic writes, downloads, progress, weights."""
