"""How much README.md and docs/ may say, and the decimal numbers of their prose that no table of results has."""

README_LINES = 70
README_DECIMALS = 10
README_PARENTHESES = 5
PAGES = 37
ENTRIES = 47
LINES = 3112
PAGE_LINES = 178
DECIMALS = 191
NUMBERS = 6
UNTRACED = 31

CONSTANTS = {
    "3.11": "the oldest Python",
    "2.7": "GB that an installation takes",
    "6.5": "MB of the packaged encoder",
    "13.0": "the version of CUDA on the page that `make gpu` writes",
    "0.005": "the largest number that is shown as 0.00",
    "0.00006": "the distance of single-precision numbers near 1000",
    "0.05": "a level of significance",
    "0.9999": "the lowest cosine of rounded features in a test",
    "0.015": "a setting of the search for near-copies",
}
