"""Python interface to data sets, training, evaluation and results; the pipeline's stages use it as well."""
