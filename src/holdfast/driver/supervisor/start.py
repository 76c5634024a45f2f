"""The file that is run. Its package is found by its place, last in line, so that it hides nothing of Python's own."""

import os
import sys

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        code = __import__("supervisor").main(*sys.argv[1:])
    except FileNotFoundError:  # deleted before we came
        code = 0
    sys.exit(code)
