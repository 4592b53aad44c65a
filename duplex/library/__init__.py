"""The library: data sets, training, evaluation and results as objects, for Python and for the stages."""
