"""Building blocks of methods."""
