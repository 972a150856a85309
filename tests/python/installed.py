"""Ends with success if the packages that requirements files pin (`name==version`) are installed in these versions."""

import importlib.metadata
import sys

for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as requirements:
        for name, _, version in (line.strip().partition("==") for line in requirements if "==" in line):
            found = importlib.metadata.version(name)
            if found != version:
                sys.exit(f"{name} {found} is installed, not {version}")
