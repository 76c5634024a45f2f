"""The file that is run. Its package is found by its place, last in line, so that it hides nothing of Python's own."""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
main = __import__("supervisor").main

if __name__ == "__main__":
    try:
        code = main(*sys.argv[1:])
    except FileNotFoundError:  # deleted before we came
        code = 0
    sys.exit(code)
