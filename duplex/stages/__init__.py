"""The stages of the pipeline, as functions that both `dvc repro` and the `duplex` command call."""
