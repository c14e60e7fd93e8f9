"""Print a pin for the lowest version that pyproject.toml promises of each package in some tables.

``make test-oldest`` installs these versions into an environment of their own and runs the suite
there. Tables are ``dependencies``, extras and groups: ``python tests/lowest_versions.py llm dev``.
"""

import re
import sys
import tomllib
from pathlib import Path


def lowest_versions(pyproject: str, names: list[str]) -> list[str]:
    """Return a requirement ``name==version`` for each ``name>=version`` of the named tables."""
    read = tomllib.loads(pyproject)
    project = read["project"]
    tables = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    tables |= read["dependency-groups"]
    promised = [line for name in names for line in tables[name]]
    # extras of a package and markers are no part of a pin
    return sorted({re.sub(r"\[.*?\]|;.*", "", line).replace(">=", "==") for line in promised})


if __name__ == "__main__":
    print(*lowest_versions(Path("pyproject.toml").read_text(), sys.argv[1:]), sep="\n")
