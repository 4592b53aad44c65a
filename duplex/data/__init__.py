"""Data sets: images and labels from any source, listed in one table, the manifest."""
