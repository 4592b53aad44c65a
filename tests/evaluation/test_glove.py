from pathlib import Path

import numpy as np
import pytest

from duplex.errors import DuplexError
from duplex.evaluation.vectors import OTHER_WORDS, read_word_vectors, unlike_published
from duplex.labels import prompt_name

GLOVE = "the 0 0 0\nfaux 1 0 0\nfur 0 1 0\nmid 0 0 2\ncalf 0 0 4\ndry-erase 5 5 5\npen 1 1 1\nçava 9 9 9\nfake 7 0 0\n"


@pytest.fixture
def glove(tmp_path: Path) -> Path:
    path = tmp_path / "glove.txt"
    path.write_text(GLOVE, encoding="utf-8")
    return path


def test_names_of_several_words_are_averaged(glove: Path) -> None:
    found = read_word_vectors(glove, ["Faux.Cat.Fur", "fur", "Mid-Calf", "dry-erase_pen", "faux_unicorn-fur", "Çava"])
    expected: list[list[float]] = [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 3], [3, 3, 3], [0.5, 0.5, 0], [9, 9, 9]]
    np.testing.assert_allclose(found.vectors, expected)
    assert found.missing == ("cat", "unicorn")


def test_names_of_the_benchmarks_get_the_words_of_csps_code(glove: Path) -> None:
    glove.write_text(GLOVE + "sneakers 3 3 3\ntower 2 2 2\n", encoding="utf-8")
    found = read_word_vectors(glove, ["Faux.Fur", "Shoes.Sneakers.and.Athletic.Shoes", "eiffel_tower"])
    expected: list[list[float]] = [[3.5, 0.5, 0], [3, 3, 3], [2, 2, 2]]
    np.testing.assert_allclose(found.vectors, expected)
    assert len(OTHER_WORDS) == 21 and all(prompt_name(name) == name for name in OTHER_WORDS)


def test_feasibility_is_published_with_vectors_of_300_numbers_of_all_words() -> None:
    assert unlike_published({"width": 300, "missing": []}) == ""
    assert "have 50 numbers, not 300; set evaluation.word_vectors to" in unlike_published({"width": 50, "missing": []})
    assert "no word vectors of 'cat'; set" in unlike_published({"width": 300, "missing": ["cat"]})
    assert "text features, not by GloVe" in unlike_published(None)


@pytest.mark.parametrize(
    "line, message", [("fur 1 x 2", "line 10"), ("horn 1 2", r"lengths, \[2, 3\]"), ("horn 1 nan 0", "NaN or infinite")]
)
def test_broken_lines_are_refused(glove: Path, line: str, message: str) -> None:
    glove.write_text(GLOVE.replace("fur 0 1 0", "felt 0 1 0") + line + "\n", encoding="utf-8")
    with pytest.raises(DuplexError, match=message):
        read_word_vectors(glove, ["faux", line.partition(" ")[0]])


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DuplexError, match="cannot be read"):
        read_word_vectors(tmp_path / "none.txt", ["fur"])


def test_names_without_any_known_word_are_listed_up_to_ten(glove: Path) -> None:
    with pytest.raises(DuplexError, match=r"glove.txt has no vector for any word of 'gnu0', .*'gnu9' and 3 more;"):
        read_word_vectors(glove, [*(f"gnu{number}" for number in range(13)), "fur"])


def test_the_first_line_of_the_word_with_numbers_counts(glove: Path) -> None:
    glove.write_text("fur coat@shop.com 9 9 9\nfur\nfur \nfur 1 2\nfur 3 4\nother x\n", encoding="utf-8")
    assert read_word_vectors(glove, ["fur"]).vectors.tolist() == [[1, 2]]
