"""What the three benchmarks are published to hold, to compare a copy on disk with."""

from __future__ import annotations

from duplex.data.stats import SplitCounts, Statistics

# The paper prints 19,191 test images for MIT-States, a misprint: the published split has 12,995.
# For C-GQA's validation pairs many papers, this one too, print the seen and the unseen count the wrong way round.
PUBLISHED = {
    "mit-states": Statistics(
        115,
        245,
        {
            "train": SplitCounts(1262, 0, 30338),
            "val": SplitCounts(300, 300, 10420),
            "test": SplitCounts(400, 400, 12995),
        },
        None,
    ),
    "ut-zappos": Statistics(
        16,
        12,
        {"train": SplitCounts(83, 0, 22998), "val": SplitCounts(15, 15, 3214), "test": SplitCounts(18, 18, 2914)},
        None,
    ),
    "cgqa": Statistics(
        413,
        674,
        {
            "train": SplitCounts(5592, 0, 26920),
            "val": SplitCounts(1040, 1252, 7280),
            "test": SplitCounts(888, 923, 5098),
        },
        None,
    ),
}


def differences(name: str, stats: Statistics) -> list[str]:
    """Where a known data set differs from the published table; images are compared where they were counted."""
    published = PUBLISHED.get(name)
    if published is None:
        return []
    rows = [("states", stats.states, published.states), ("objects", stats.objects, published.objects)]
    for split, counts in stats.splits.items():
        other = published.splits[split]
        rows += [
            (f"{split} seen pairs", counts.seen, other.seen),
            (f"{split} unseen pairs", counts.unseen, other.unseen),
        ]
        if counts.images is not None and other.images is not None:
            rows.append((f"{split} images", counts.images, other.images))
    return [f"{what}: {here:,}, published {there:,}" for what, here, there in rows if here != there]
