"""Measure answers: python -m benchmarks.answers --run RUN [--json]

`by_share`: accuracy among all pairs, per cent, on the test images of seen and of new pairs: with the share of new pairs
that the model assumes, with that of the test images, and (`alone`) if it is known whether an image's pair is new.
Everything else is of 400 test images drawn by seed, 13 % of them of unseen pairs. `listed`: accuracy of the first
answer, per cent; `by_score`: of the best score alone.
`calibration_error`: expected calibration error of the first answer's probability in 15 bins of equal width, per cent;
`calibration_error_by_chance`: its average if every probability were right, as few images differ from their probability
by chance; `calibration_error_plain`: of the method's own probability of its best score.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import emit, options, say
from duplex import Recognizer, read_features
from duplex.artifacts import ArtifactPaths
from duplex.config.params import load_params
from duplex.data.tables import read_manifest
from duplex.evaluation.accumulate import Floats
from duplex.evaluation.answered import GroupAnswers, Reliability
from duplex.evaluation.probabilities import NEW_SHARE, log_probabilities
from duplex.labels import Bools, Ints

IMAGES, UNSEEN, BLOCK = 400, 0.13, 256
Images = NDArray[Any] | list[Path]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--run", type=Path, default=Path("artifacts/shapes/dual/0"))
    arguments = parser.parse_args()
    recognizer = Recognizer.load(arguments.run, device="cpu")
    images, target = test_images(recognizer, arguments.run)
    chosen = drawn(recognizer.labels.is_seen(target))
    few = images[chosen] if isinstance(images, np.ndarray) else [images[row] for row in chosen]
    record = measured(recognizer, few, target[chosen])
    record["by_share"] = by_share(recognizer, images, target)
    emit(record) if arguments.json else say(str(record))


def test_images(recognizer: Recognizer, run: Path) -> tuple[Images, Ints]:
    """Features [N, d] of all test images, or their files for a run with fine-tuned blocks; and their compositions."""
    paths, dataset = ArtifactPaths(run.parents[2]), run.parents[1].name
    manifest = read_manifest(paths.manifest(dataset))
    rows = np.flatnonzero(manifest["split"] == "test")
    target = recognizer.labels.index(manifest["state"].tolist(), manifest["object"].tolist())[rows]
    if recognizer.trained.outputs.block_inputs:
        root = load_params().dataset(dataset).source.root
        return [root / name for name in manifest["image"].iloc[rows]], target
    return read_features(paths.features(dataset)).cls[rows], target


def drawn(is_seen: Bools) -> Ints:
    """The numbers of 400 images, 13 % of them of unseen pairs."""
    random, unseen = np.random.default_rng(0), round(UNSEEN * IMAGES)
    groups = (np.flatnonzero(~is_seen), unseen), (np.flatnonzero(is_seen), IMAGES - unseen)
    return np.concatenate([random.choice(group, count, replace=False) for group, count in groups])


def group_answers(recognizer: Recognizer, images: Images, target: Ints) -> GroupAnswers:
    """Answers in the last of the model's worlds at any share of new pairs, from one scoring pass."""
    candidates = recognizer.candidates(world := recognizer.worlds[-1])
    compositions = recognizer.labels.composition(candidates.state_of, candidates.object_of)
    parts = []
    for start in range(0, len(target), BLOCK):
        scores = recognizer.scores(images[start : start + BLOCK], world)
        parts.append(candidates.even_log_posteriors(scores).exp().cpu().numpy())
    q = np.concatenate(parts)
    groups = [np.where(mask, q, 0.0) for mask in (candidates.seen, ~candidates.seen)]
    return GroupAnswers(
        recognizer.labels,
        np.arange(len(target)),
        target,
        best=np.stack([compositions[group.argmax(1)] for group in groups], 1),
        probability=np.stack([group.max(1) for group in groups], 1),
        unseen=groups[1].sum(1),
        stored=candidates.confidence.new_share,
        mass=candidates.mass,
    )


def by_share(recognizer: Recognizer, images: Images, target: Ints) -> dict[str, dict[str, float]]:
    answers = group_answers(recognizer, images, target)
    is_new = ~recognizer.labels.is_seen(target)
    shares = {"assumed": NEW_SHARE, "true": answers.true_share}
    right = {name: answers.at(share).right for name, share in shares.items()}
    right["alone"] = answers.best[np.arange(len(target)), is_new.astype(int)] == target
    groups = {"seen": ~is_new, "new": is_new}
    record = {
        name: {group: round(100 * float(hits[mask].mean()), 1) for group, mask in groups.items()}
        for name, hits in right.items()
    }
    return record | {"shares": {name: round(100 * share, 1) for name, share in shares.items()}}


def measured(recognizer: Recognizer, images: Images, target: Ints) -> dict[str, Any]:
    candidates = recognizer.candidates()
    compositions = recognizer.labels.composition(candidates.state_of, candidates.object_of)
    scores = recognizer.scores(images)
    answers = recognizer(images, top=1)
    best = recognizer.labels.index(*zip(*((answer.best.state, answer.best.object) for answer in answers), strict=True))
    right = best == target
    share = np.array([answer.best.probability for answer in answers])
    plain = log_probabilities(candidates.probabilities, scores).exp().max(1)
    by_score = compositions[plain.indices.numpy()] == target
    return {
        "images": len(target),
        "listed": round(100 * float(right.mean()), 1),
        "by_score": round(100 * float(by_score.mean()), 1),
        "calibration_error": round(100 * calibration_error(share, right), 1),
        "calibration_error_by_chance": round(100 * error_by_chance(share), 1),
        "calibration_error_plain": round(100 * calibration_error(plain.values.numpy(), by_score), 1),
        **recognizer.trained.confidence.to_dict(),
    }


def calibration_error(share: Floats, right: Bools) -> float:
    return Reliability.of(share, right, np.ones(len(share))).calibration_error


def error_by_chance(share: Floats, draws: int = 1000) -> float:
    """The mean calibration error of answers that are right as often as their probabilities say."""
    random = np.random.default_rng(0)
    return float(np.mean([calibration_error(share, random.random(len(share)) < share) for _ in range(draws)]))


if __name__ == "__main__":
    main()
