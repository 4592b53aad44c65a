from pathlib import Path

import numpy as np
import pytest

from duplex.errors import DuplexError, UsageError
from duplex.features.importing import import_features
from duplex.features.store import open_features


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_own_features_become_a_cache(tmp_path: Path, dtype: type) -> None:
    values: np.ndarray = np.random.default_rng(0).standard_normal((7, 5)).astype(dtype)
    values[3, 1] = np.nan
    np.save(tmp_path / "f.npy", values)
    import_features(tmp_path / "f.npy", 7, "m", tmp_path / "features.h5")
    found = open_features(tmp_path / "features.h5", {"encoder": "ViT", "weights": "w", "manifest": "m", "dim": "5"})
    good = np.arange(7) != 3
    assert np.allclose(found.cls[good], values[good], atol=2e-3) and found.reasons == ["features not finite"]
    for expect in ({"manifest": "n"}, {"manifest": "m", "dim": "6"}):
        with pytest.raises(DuplexError, match=r"another (manifest|feature width)"):
            open_features(tmp_path / "features.h5", expect)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((6, 5), np.float32), "has 6 rows and the manifest 7"),
        (np.zeros((7, 5), np.int64), "must hold one array"),
        (np.zeros(7, np.float32), "must hold one array"),
        (np.full((7, 5), 1e6, np.float32), "above 65504"),
        (np.array([None] * 7), "not an array"),
    ],
)
def test_what_cannot_be_features_is_said(tmp_path: Path, values: np.ndarray, message: str) -> None:
    np.save(tmp_path / "f.npy", values, allow_pickle=True)
    with pytest.raises(DuplexError, match=message):
        import_features(tmp_path / "f.npy", 7, "m", tmp_path / "features.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["f.npy"]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        import_features(tmp_path / "f.npy", 7, "m", tmp_path / "features.h5")
