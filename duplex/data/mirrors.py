"""Where the three benchmarks can be had, under which terms, and which parts of the archives belong where.

Links rot: every one of them stands here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from duplex.data.czsl_layout import METADATA
from duplex.data.pair_lists import FOLDER as LISTS

GB = 1 << 30


@dataclass(frozen=True)
class Archive:
    file: str
    urls: tuple[str, ...]  # tried in this order, encrypted ones first
    take: dict[str, tuple[str, ...]]  # name below the data root -> what it may be called in the archive
    limit: int  # bytes that may come out of it
    page: str  # where a person finds it when no link answers
    sha256: str = ""  # of the file, where its publisher says it


@dataclass(frozen=True)
class Benchmark:
    archives: tuple[Archive, ...]
    terms: str
    citation: str


def _splits(folder: str) -> Archive:
    return Archive(
        "compositional_split_natural.tar.gz",
        (
            "https://www.senthilpurushwalkam.com/publication/compositional/compositional_split_natural.tar.gz",
            "https://senthilpurushwalkam.com/publications/compositional/compositional_split_natural.tar.gz",
            "https://www.cs.cmu.edu/~spurushw/publication/compositional/compositional_split_natural.tar.gz",
            "http://www.cs.cmu.edu/~spurushw/publication/compositional/compositional_split_natural.tar.gz",
        ),
        {name: (f"{folder}/{name}", name) for name in (METADATA, LISTS)},
        GB,
        "https://github.com/facebookresearch/taskmodularnets",
    )


SPLIT_CITATION = (
    "Purushwalkam et al., Task-Driven Modular Networks for Zero-Shot Compositional Learning, ICCV 2019 (split)"
)

BENCHMARKS = {
    "mit-states": Benchmark(
        (
            Archive(
                "release_dataset.zip",
                (
                    "https://wednesday.csail.mit.edu/joseph_result/state_and_transformation/release_dataset.zip",
                    "http://wednesday.csail.mit.edu/joseph_result/state_and_transformation/release_dataset.zip",
                ),
                {"images": ("release_dataset/images", "images")},
                12 * GB,
                "http://web.mit.edu/phillipi/Public/states_and_transformations/index.html",
            ),
            _splits("mit-states"),
        ),
        "its page states no licence; the pictures come from web searches and remain their owners'. For research.",
        f"Isola et al., Discovering States and Transformations in Image Collections, CVPR 2015; {SPLIT_CITATION}",
    ),
    "ut-zappos": Benchmark(
        (
            Archive(
                "ut-zap50k-images.zip",
                (
                    "https://vision.cs.utexas.edu/projects/finegrained/utzap50k/ut-zap50k-images.zip",
                    "http://vision.cs.utexas.edu/projects/finegrained/utzap50k/ut-zap50k-images.zip",
                ),
                {"_images": ("ut-zap50k-images",)},
                4 * GB,
                "https://vision.cs.utexas.edu/projects/finegrained/utzap50k/",
            ),
            _splits("ut-zap50k"),
        ),
        "for academic, non-commercial use; the pictures belong to Zappos.com. Read the terms on its page.",
        f"Yu and Grauman, Fine-Grained Visual Comparisons with Local Learning, CVPR 2014; {SPLIT_CITATION}",
    ),
    "cgqa": Benchmark(
        (
            Archive(
                "cgqa-updated.zip",
                ("https://s3.mlcloud.uni-tuebingen.de/czsl/cgqa-updated.zip",),
                {name: (name, f"cgqa/{name}", f"cgqa-updated/{name}") for name in ("images", METADATA, LISTS)},
                24 * GB,
                "https://github.com/ExplainableML/czsl",
            ),
        ),
        "made from GQA and Visual Genome, which are under CC BY 4.0. Read the terms on their pages.",
        "Naeem et al., Learning Graph Embeddings for Compositional Zero-Shot Learning, CVPR 2021",
    ),
}
