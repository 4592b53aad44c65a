"""`duplex fit` and `duplex update`: from a folder of labelled images to a model folder, without a project."""
