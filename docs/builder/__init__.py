"""Pages of the manual that are made from the code. Nothing here imports torch."""
