"""Methods, one module per kind. All read cached features, even where a method's paper trains the image encoder."""
