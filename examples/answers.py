"""Evaluate what a large vision-language model says about the test images of a data set.

    python examples/answers.py prompt --dataset shapes                     # the question to ask about each image
    python examples/answers.py words answers.csv out.csv --dataset shapes
    python examples/answers.py likelihoods answers.csv out.npz --dataset shapes

`words` reads the columns `image, answer`, an answer being a state and an object such as `striped heart`. `likelihoods`
reads `image, state, object, log_likelihood`, a row for each image and candidate. `duplex score` evaluates the output.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from duplex.artifacts import ArtifactPaths
from duplex.data.tables import read_manifest
from duplex.labels import LabelSpace, prompt_name


def prompt(labels: LabelSpace) -> str:
    """The question, with all words to choose from."""
    states, objects = (", ".join(map(prompt_name, names)) for names in (labels.states, labels.objects))
    return (
        f"Which state and which object does the image show? States: {states}. Objects: {objects}. "
        "Answer with exactly one state followed by one object, and nothing else."
    )


def as_pair(answer: str, labels: LabelSpace) -> tuple[str, str]:
    """An answer's state and object; without a known pair, its first word and the rest, which count as wrong."""
    words = prompt_name("".join(letter for letter in answer if letter not in ".,!\"'*")).split()
    known = [set(map(prompt_name, names)) for names in (labels.states, labels.objects)]
    cuts = [(" ".join(words[:cut]), " ".join(words[cut:])) for cut in range(1, max(2, len(words)))]
    return next((pair for pair in cuts if pair[0] in known[0] and pair[1] in known[1]), cuts[0])


def words(test: pd.DataFrame, answers: pd.DataFrame, labels: LabelSpace) -> pd.DataFrame:
    """The table for `duplex score`: labels and answers; an image without an answer counts as wrong."""
    given = answers.drop_duplicates("image").set_index("image")["answer"]
    texts = [given.get(image, "") for image in test["image"]]
    if lacking := texts.count(""):
        print(f"{lacking} of {len(test)} test images have no answer and count as wrong", file=sys.stderr)
    pairs = [as_pair(text, labels) for text in texts]
    return test[["state", "object"]].assign(
        answer_state=[state for state, _ in pairs], answer_object=[name for _, name in pairs]
    )


def likelihoods(test: pd.DataFrame, rows: pd.DataFrame, labels: LabelSpace, world: str) -> dict[str, np.ndarray]:
    """The arrays of a score file: log-likelihoods of all candidates of a world."""
    candidates = labels.candidates(world, "test")
    numbers = labels.index(rows["state"].tolist(), rows["object"].tolist())
    table = rows.assign(c=numbers, score=rows["log_likelihood"].astype(float)).pivot(
        index="image", columns="c", values="score"
    )
    scores = table.reindex(index=test["image"], columns=candidates).to_numpy(float)
    if np.isnan(scores).any():
        raise SystemExit(f"{int(np.isnan(scores).sum())} pairs of image and candidate have no log-likelihood; add them")
    target = candidates.searchsorted(labels.index(test["state"].tolist(), test["object"].tolist()))
    named = {"state": labels.state_of(candidates), "object": labels.object_of(candidates)}
    return {"scores": scores, "target": target, "seen": labels.is_seen(candidates), **named}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prompt", "words", "likelihoods"])
    parser.add_argument("answers", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--world", choices=["closed", "open"], default="closed")
    given = parser.parse_args()
    paths = ArtifactPaths()
    labels, manifest = LabelSpace.load(paths.labels(given.dataset)), read_manifest(paths.manifest(given.dataset))
    test = manifest[manifest["split"] == "test"]
    if given.what == "prompt":
        print(prompt(labels))
        return
    if given.out is None:
        parser.error("give the file of answers and the file to write")
    rows = pd.read_csv(given.answers, dtype=str, keep_default_na=False)
    if given.what == "words":
        words(test, rows, labels).to_csv(given.out, index=False)
    else:
        np.savez(given.out, **likelihoods(test, rows, labels, given.world))


if __name__ == "__main__":
    main()
