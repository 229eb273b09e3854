"""What a package says of where it comes from: one setting, `repository` in pyproject.toml.

Where it is empty there are no URLs, and README's links stay relative. With an address the
links of the README that is shown elsewhere lead into the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


class ProjectMetadata(MetadataHookInterface):
    """README and URLs."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = str(self.config["repository"])
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, repository),
        }
        metadata["urls"] = urls(repository)


def urls(repository: str) -> dict[str, str]:
    """What an index of packages links to."""
    if not repository:
        return {}
    base = repository.rstrip("/")
    return {
        "Repository": base,
        "Documentation": f"{base}/blob/HEAD/docs/architecture.md",
        "Changelog": f"{base}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{base}/issues",
    }


def absolute(text: str, repository: str) -> str:
    """Markdown whose links to files of the repository work from anywhere."""
    if not repository:
        return text

    def lead(match: re.Match[str]) -> str:
        image, words, place = match.groups()
        way = "raw" if image else "blob"
        return f"{image}[{words}]({repository.rstrip('/')}/{way}/HEAD/{place})"

    return LINK.sub(lead, text)
