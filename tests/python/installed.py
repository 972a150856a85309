"""Ends with success if the packages that requirements files pin (`name==version`) are installed in these versions.

Any build of a version will do: `2.14.0+cpu` is 2.14.0.
"""

import importlib.metadata
import sys

for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as requirements:
        for name, _, version in (line.strip().partition("==") for line in requirements if "==" in line):
            found = importlib.metadata.version(name).partition("+")[0]
            if found != version:
                sys.exit(f"{name} {found} is installed, not {version}")
