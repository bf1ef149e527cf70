"""Write the generated parts of docs/: `make docs`.

A page holds generated text between two comments. The text comes from the models that the program
itself uses: the job file's schema and the models of the records.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent
_GENERATED = re.compile(
    r"(<!-- generated: (?P<name>[\w-]+)\. .*? -->\n).*?(<!-- end of generated text -->)", re.DOTALL
)


def job_file() -> str:
    """Return the tables of every field of a job file."""
    from docs.job_tables import job_markdown

    return job_markdown()


def records() -> str:
    """Return the tables of every record that a run writes."""
    from docs.record_tables import records_markdown

    return records_markdown()


GENERATORS: dict[str, Callable[[], str]] = {"job-file": job_file, "records": records}


def regenerated(page: str) -> str:
    """Return the text of a page with its generated parts replaced by what the models say now."""

    def replacement(match: re.Match[str]) -> str:
        return f"{match[1]}\n{GENERATORS[match['name']]().strip()}\n\n{match[3]}"

    return _GENERATED.sub(replacement, page)


def generated_pages() -> list[Path]:
    """Return the pages with generated parts."""
    pages = sorted(DOCS.glob("*.md"))
    return [page for page in pages if _GENERATED.search(page.read_text(encoding="utf-8"))]


def main() -> None:
    """Rewrite every page that has generated parts."""
    for page in generated_pages():
        page.write_text(regenerated(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {page.name}")


if __name__ == "__main__":
    main()
