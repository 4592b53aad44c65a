"""How much README.md and docs/ may say, and the decimal numbers of their prose that no table of results has."""

README_LINES = 70
README_DECIMALS = 10
README_PARENTHESES = 5
PAGES = 28
ENTRIES = 30
LINES = 2200
PAGE_LINES = 200
DECIMALS = 60
NUMBERS = 2
COLUMNS = 10

CONSTANTS = {
    "3.11": "the oldest Python",
    "1.0": "the version from which the interface is stable",
}
