"""Copies the documentation to a folder from which the site is built.

    python docs/stage.py build/docs

Pages outside docs/ get a place on the site, and their links are rewritten. Other files that a page
links to, such as examples, are copied beside the pages, so that every link works without a
repository behind it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

ELSEWHERE = {
    "README.md": "index.md",
    "DESIGN.md": "explanation/design.md",
    "CHANGELOG.md": "explanation/changes.md",
    "CONTRIBUTING.md": "explanation/contributing.md",
    "SECURITY.md": "explanation/security.md",
    "tests/faults/README.md": "explanation/faults.md",
    "simulation/README.md": "explanation/simulation.md",
    "bench/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
    "deploy/README.md": "deploy/index.md",
    "deploy/examples.md": "deploy/examples.md",
    **{
        f"deploy/{part}/README.md": f"deploy/{part}.md"
        for part in ("kubernetes", "slurm", "ray", "systemd")
    },
}
"""Pages outside docs/, and where the site has them."""

LINK = re.compile(r"(\]\(|src=\")(?!https?:|mailto:|#)([^)#\s\"]+)(#[^)\s\"]*)?")


def place_of(path: Path) -> Path:
    """Return where the site has a file of the project, relative to its root."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        page = f"{name}/README.md"
        return Path(ELSEWHERE[page]) if page in ELSEWHERE else Path("files") / name
    if name in ELSEWHERE:
        return Path(ELSEWHERE[name])
    return path.relative_to(DOCS) if path.is_relative_to(DOCS) else Path("files") / name


def rewritten(text: str, page: Path, copy: Callable[[Path], object]) -> str:
    """Return a page's text with links for the site; ``copy`` is called with each linked file."""

    def link(match: re.Match[str]) -> str:
        target = (page.parent / match[2]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            raise SystemExit(f"{page.relative_to(ROOT)}: there is no {match[2]}")
        copy(target)
        relative = os.path.relpath(place_of(target), place_of(page).parent)
        return f"{match[1]}{relative}{match[3] or ''}"

    return LINK.sub(link, text)


def stage(out: Path) -> None:
    """Write every page and every file that pages link to."""

    def copy(path: Path) -> None:
        target = out / place_of(path)
        if path.is_file() and path.suffix != ".md" and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)

    pages = [*DOCS.rglob("*.md"), *(ROOT / name for name in ELSEWHERE if (ROOT / name).exists())]
    for page in pages:
        if page == ROOT / "README.md":
            continue  # the site's first page is docs/index.md
        target = out / place_of(page)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(rewritten(page.read_text(), page, copy))


if __name__ == "__main__":
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    stage(Path(sys.argv[1]))
