"""Methods: one module per kind. All read cached features, also where the paper trains the image encoder."""
