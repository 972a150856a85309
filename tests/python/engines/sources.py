"""Unpacks the sources of a wheel: all but compiled files.

    python sources.py WHEEL FOLDER
"""

import sys
import zipfile

if __name__ == "__main__":
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith((".so", ".a", ".o")) and ".so." not in name]
        wheel.extractall(sys.argv[2], names)
