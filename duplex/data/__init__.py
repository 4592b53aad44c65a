"""Data sets: images and labels from any source, as one table, the manifest."""
