"""``python -m slimkv.lab.bench``: the ``slimkv bench`` commands where typer and rich are missing."""

import sys

from slimkv.lab.bench.commands import main

if __name__ == "__main__":
    sys.exit(main())
