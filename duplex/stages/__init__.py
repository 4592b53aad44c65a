"""Where params.yaml meets `artifacts/`: one function a stage, behind `dvc repro` and the `duplex` command alike."""
