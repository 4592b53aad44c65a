"""Download links, terms and citations of MIT-States, UT-Zappos and C-GQA; all links of the package are here."""

from __future__ import annotations

from dataclasses import dataclass

from duplex.data.czsl_layout import FOLDER as LISTS
from duplex.data.czsl_layout import METADATA

GB = 1 << 30


@dataclass(frozen=True)
class BenchmarkArchive:
    """Archive file of a benchmark: its download addresses, and the files to unpack from it."""

    file: str  # its name
    urls: tuple[str, ...]  # tried in this order, encrypted ones first
    take: dict[str, tuple[str, ...]]  # name below the data root -> possible names in the archive
    limit: int  # most bytes that may be unpacked
    page: str  # web page to find the archive when no link works


@dataclass(frozen=True)
class Benchmark:
    """A published data set: its archives, terms and citation."""

    archives: tuple[BenchmarkArchive, ...]
    terms: str
    citation: str


def _both(address: str) -> tuple[str, str]:
    return f"https://{address}", f"http://{address}"


def _splits(folder: str) -> BenchmarkArchive:
    return BenchmarkArchive(
        "compositional_split_natural.tar.gz",
        (
            "https://www.senthilpurushwalkam.com/publication/compositional/compositional_split_natural.tar.gz",
            "https://senthilpurushwalkam.com/publications/compositional/compositional_split_natural.tar.gz",
            *_both("www.cs.cmu.edu/~spurushw/publication/compositional/compositional_split_natural.tar.gz"),
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
            BenchmarkArchive(
                "release_dataset.zip",
                _both("wednesday.csail.mit.edu/joseph_result/state_and_transformation/release_dataset.zip"),
                {"images": ("release_dataset/images", "images")},
                12 * GB,
                "http://web.mit.edu/phillipi/Public/states_and_transformations/index.html",
            ),
            _splits("mit-states"),
        ),
        "its page states no licence; the images come from web searches and remain their owners'. For research.",
        f"Isola et al., Discovering States and Transformations in Image Collections, CVPR 2015; {SPLIT_CITATION}",
    ),
    "ut-zappos": Benchmark(
        (
            BenchmarkArchive(
                "ut-zap50k-images.zip",
                _both("vision.cs.utexas.edu/projects/finegrained/utzap50k/ut-zap50k-images.zip"),
                {"_images": ("ut-zap50k-images",)},
                4 * GB,
                "https://vision.cs.utexas.edu/projects/finegrained/utzap50k/",
            ),
            _splits("ut-zap50k"),
        ),
        "for academic, non-commercial use; the images belong to Zappos.com. Read the terms on its page.",
        f"Yu and Grauman, Fine-Grained Visual Comparisons with Local Learning, CVPR 2014; {SPLIT_CITATION}",
    ),
    "cgqa": Benchmark(
        (
            BenchmarkArchive(
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
