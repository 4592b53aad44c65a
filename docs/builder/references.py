"""The list of references, made from docs/references.bib, and the citations that have no entry there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

TOPICS = {
    "paper": "The paper implemented here",
    "method": "Methods",
    "data": "Data sets",
    "encoder": "Encoders, adapters and word vectors",
    "metric": "Metrics and statistics",
    "quoted": "Quoted in the report only",
}
ENTRY = re.compile(r"^@\w+\{(\w+),\n(.*?)^\}$", re.M | re.S)
FIELD = re.compile(r"(\w+) = \{((?:[^{}]|\{[^{}]*\})*)\}")
CITATION = re.compile(r"\b([A-Z][a-zA-Z-]+) (?:et al\.|and [A-Z][a-z]+),? ([^.;|`]{0,160}?)\(?\b((?:19|20)\d\d)\b")
OWN = ("prompts", "closed_form", "linear", "product")  # kinds of this package: several publications, or none


@dataclass(frozen=True)
class Reference:
    """An entry of the file: its key and its fields."""

    key: str
    fields: dict[str, str]

    def surnames(self) -> list[str]:
        """The authors' family names."""
        return [author.partition(",")[0] for author in self.fields["author"].split(" and ")]

    def line(self) -> str:
        """The entry as an item of a list, with an anchor."""
        get = self.fields.get
        names = self.surnames()
        authors = " and ".join(names) if len(names) < 3 and names[-1] != "others" else f"{names[0]} et al."
        when = " ".join(filter(None, (get("venue"), get("year"))))
        addresses = {
            f"arXiv {get('eprint')}": get("eprint") and f"https://arxiv.org/abs/{get('eprint')}",
            "DOI": get("doi") and f"https://doi.org/{get('doi')}",
            "page": get("url"),
            "code": get("code"),
        }
        links = ", ".join(f"[{words}]({address})" for words, address in addresses.items() if address)
        note = f" ({get('note')})" if get("note") else ""
        return (
            f'* <a id="{self.key}"></a>**{get("name")}** (`{self.key}`): {authors}, “{get("title")}”, {when}{note}.'
            f" {links}. Here: {get('used')}."
        )


def read_references(path: Path) -> list[Reference]:
    """The entries of a BibTeX file of this form: one field after another, values in braces."""
    found = ENTRY.findall(path.read_text(encoding="utf-8"))
    return [
        Reference(key, {name: " ".join(value.split()) for name, value in FIELD.findall(body)}) for key, body in found
    ]


def references_list(path: Path) -> str:
    """The entries of a file by topic."""
    references = read_references(path)
    parts = []
    for topic, title in TOPICS.items():
        lines = [entry.line() for entry in references if entry.fields["topic"] == topic]
        parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def missing_references(root: Path, references: list[Reference]) -> list[str]:
    """One line per citation in the docs and the package, method, quoted row or link that has no entry."""
    known = {(entry.surnames()[0], entry.fields.get("year", "")) for entry in references}
    keys = {entry.key for entry in references}
    names = {entry.fields["name"].lower() for entry in references}
    missing = []
    pages = [page for page in (root / "docs").rglob("*.md") if page.name != "references.md"]
    for path in sorted([*pages, *(root / "duplex").rglob("*.py"), *(root / "duplex").rglob("*.yaml")]):
        text = " ".join(path.read_text(encoding="utf-8").split())
        where = path.relative_to(root)
        cited = {(name, year) for name, _, year in CITATION.findall(text)}
        missing += [f"{where}: {name} {year} has no entry" for name, year in sorted(cited - known)]
        missing += [
            f"{where}: no entry {key}" for key in re.findall(r"references\.md#([\w-]+)", text) if key not in keys
        ]
    points = re.findall(r'^(\w+) = "duplex\.methods\.\w+:', (root / "pyproject.toml").read_text(), re.M)
    adapters = {"bottleneck", "parallel", "full", "lora"}
    used = " ".join(entry.fields["used"] for entry in references).replace(",", " ").split()
    missing += [f"pyproject.toml: kind {kind} has no entry" for kind in points if kind not in {*used, *OWN, *adapters}]
    quoted = YAML(typ="safe").load(root / "duplex/report/quoted.yaml")
    rows = {row["method"].partition("(")[0] for row in [*quoted["closed"], *quoted["open"]]}
    missing += [f"duplex/report/quoted.yaml: {name} has no entry" for name in sorted(rows) if name.lower() not in names]
    return missing
