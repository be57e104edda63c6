"""Addresses and the description in the package's metadata, set when the package is built.

PyPI resolves no relative address. With FACTSCOPE_REPOSITORY, the address of the repository, images
and links of README.md become absolute, at the tag of the version. Without it, images are dropped
with their captions, and links to files keep only their text.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "FACTSCOPE_REPOSITORY"
IMAGE = re.compile(r"^(!\[[^\]]*\])\((?!https?:)([^)]*)\)\n((?:\n\*[^\n]+\*\n)?\n)", re.M)
LINK = re.compile(r"(?<!!)(\[[^\]]+\])\((?!https?:|#)([^)]*)\)")


class Addresses(MetadataHookInterface):
    """Sets `project.urls` and `project.readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both fields; hatchling has set the version."""
        repository = os.environ.get(VARIABLE, "").strip().rstrip("/").removesuffix(".git")
        if repository and not repository.startswith("https://"):
            raise ValueError(f"{VARIABLE} is {repository!r}; give an address with https://")
        readme = Path(self.root, "README.md").read_text("utf-8")
        metadata["urls"] = dict(self.config["urls"])
        if repository:
            files, images = (f"{repository}/{x}/v{metadata['version']}" for x in ("blob", "raw"))
            metadata["urls"] |= {
                "Repository": repository,
                "Documentation": f"{files}/docs/index.md",
                "Changelog": f"{files}/CHANGELOG.md",
            }
            readme = IMAGE.sub(rf"\1({images}/\2)\n\3", readme)
            readme = LINK.sub(rf"\1({files}/\2)", readme)
        else:
            readme = LINK.sub(lambda link: link[1][1:-1], IMAGE.sub("", readme))
            readme += "\n\nThe documentation and its figures are in the folder docs of the source "
            readme += "distribution.\n"
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
