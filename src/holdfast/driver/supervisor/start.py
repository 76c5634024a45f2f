"""The script of a supervisor. Its package is last on sys.path, so that it hides no standard module."""

import os
import sys

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        code = __import__("supervisor").main(*sys.argv[1:])
    except FileNotFoundError:  # the folder was deleted before
        code = 0
    sys.exit(code)
