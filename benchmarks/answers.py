"""Measure answers: python -m benchmarks.answers --run RUN [--json] [--new-share 0.1]

In the project of the run: 400 test images drawn by seed, 13 % of them of unseen pairs. `listed`: accuracy of the first
answer, per cent; `by_score`: of the best score alone; `by_bias`: of the score plus the bias of the harmonic mean.
`calibration_error`: expected calibration error of the first answer's probability in 15 bins of equal width, per cent;
`calibration_error_by_chance`: its average if every probability were right, as few images differ from their probability
by chance; `calibration_error_plain`: of the method's own probability of its best score. `flagged`: share of the images
whose answer has `in_distribution: false`, per cent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import emit, options, say
from duplex import Recognizer, read_features
from duplex.artifacts import ArtifactPaths
from duplex.config.params import load_params
from duplex.data.tables import read_manifest
from duplex.evaluation.accumulate import Floats
from duplex.evaluation.probabilities import Reliability, log_probabilities
from duplex.labels import Bools, Ints

IMAGES, UNSEEN = 400, 0.13


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--run", type=Path, default=Path("artifacts/shapes/dual/0"))
    parser.add_argument("--new-share", type=float)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    recognizer = Recognizer.load(arguments.run, device="cpu", new_share=arguments.new_share)
    images, target = drawn(recognizer, arguments.run, arguments.seed)
    record = measured(recognizer, images, target)
    emit(record) if arguments.json else say(str(record))


def drawn(recognizer: Recognizer, run: Path, seed: int) -> tuple[Floats | list[Path], Ints]:
    """Features [400, d] of test images, or their files for a run with fine-tuned blocks; and their compositions.

    13 % of the images are of unseen pairs.
    """
    paths, dataset = ArtifactPaths(run.parents[2]), run.parents[1].name
    manifest, labels = read_manifest(paths.manifest(dataset)), recognizer.labels
    rows = np.flatnonzero(manifest["split"] == "test")
    target = labels.index(manifest["state"].tolist(), manifest["object"].tolist())
    random, seen = np.random.default_rng(seed), labels.is_seen(target)[rows]
    unseen = round(UNSEEN * IMAGES)
    parts = [random.choice(rows[group], n, replace=False) for group, n in ((~seen, unseen), (seen, IMAGES - unseen))]
    chosen = np.concatenate(parts)
    if recognizer.trained.outputs.block_inputs:
        root = load_params().dataset(dataset).source.root
        return [root / name for name in manifest["image"].iloc[chosen]], target[chosen]
    return read_features(paths.features(dataset)).cls[chosen], target[chosen]


def measured(recognizer: Recognizer, images: Floats | list[Path], target: Ints) -> dict[str, Any]:
    candidates = recognizer.candidates()
    compositions = recognizer.labels.composition(candidates.state_of, candidates.object_of)
    scores = recognizer.scores(images)
    bias = recognizer.trained.calibration_of(recognizer.worlds[0]).bias
    shifted = scores + torch.from_numpy(np.where(candidates.seen, 0.0, bias)).float()
    answers = recognizer(images, top=1)
    best = recognizer.labels.index(*zip(*((answer.best.state, answer.best.object) for answer in answers), strict=True))
    right = best == target
    share = np.array([answer.best.probability for answer in answers])
    plain = log_probabilities(candidates.probabilities, scores).exp().max(1)
    by_score = compositions[plain.indices.numpy()] == target
    by_bias = compositions[shifted.argmax(1).numpy()] == target
    return {
        "images": len(target),
        **{name: round(100 * float(hits.mean()), 1) for name, hits in
           (("listed", right), ("by_score", by_score), ("by_bias", by_bias))},
        "calibration_error": round(100 * calibration_error(share, right), 1),
        "calibration_error_by_chance": round(100 * error_by_chance(share), 1),
        "calibration_error_plain": round(100 * calibration_error(plain.values.numpy(), by_score), 1),
        "flagged": flagged(answers),
        **recognizer.trained.confidence.to_dict(),
    }  # fmt: skip


def calibration_error(share: Floats, right: Bools) -> float:
    return Reliability.of(share, right, np.ones(len(share))).calibration_error


def error_by_chance(share: Floats, draws: int = 1000) -> float:
    """The mean calibration error of answers that are right as often as their probabilities say."""
    random = np.random.default_rng(0)
    return float(np.mean([calibration_error(share, random.random(len(share)) < share) for _ in range(draws)]))


def flagged(answers: Any) -> float:
    usual = [answer.in_distribution for answer in answers if hasattr(answer, "in_distribution")]
    return round(100 * (1 - sum(usual) / len(usual)), 1)


if __name__ == "__main__":
    main()
