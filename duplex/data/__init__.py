"""Pictures and labels, from wherever they come, as one manifest table."""
