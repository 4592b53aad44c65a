"""The final fit on all images, without validation, keeps its last epoch, whether or not it was interrupted."""

from dataclasses import replace
from pathlib import Path

import torch

from duplex.config.params import EvaluationParams
from duplex.methods.registry import parse_options
from duplex.options import TrainingOptions
from duplex.testing import small_inputs
from duplex.training.loop import ResumePoint
from duplex.training.run import MethodSpec, reproducible, train_on_all_images, train_run

CPU = torch.device("cpu")
SETTINGS = TrainingOptions(learning_rate=0.01, batch_size=8, epochs=1, schedule="constant", threads=1)


def test_a_final_fit_that_continues_in_its_last_epoch_keeps_that_epoch(tmp_path: Path, capsys) -> None:
    spec, inputs = (
        MethodSpec("m", "prompts", parse_options("prompts", {}), SETTINGS, ("closed",), "closed"),
        small_inputs(),
    )
    with reproducible(1):
        record = train_run(spec, inputs, 0, CPU, EvaluationParams()).record

        def fitted(epochs: int, path: Path | None = None) -> dict[str, torch.Tensor]:
            resume = ResumePoint("final fit", path, "key")
            return train_on_all_images(spec, replace(record, epoch=epochs), {}, inputs, CPU, resume).method.state_dict()

        two, three = fitted(2, tmp_path / "training.partial"), fitted(3)
        continued = fitted(3, tmp_path / "training.partial")
    assert all(torch.equal(continued[name], three[name]) for name in three)
    assert not all(torch.equal(two[name], three[name]) for name in three)
    assert "final fit: continuing after epoch 2" in capsys.readouterr().err
