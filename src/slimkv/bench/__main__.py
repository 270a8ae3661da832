"""``python -m slimkv.bench``: the ``slimkv bench`` commands where typer and rich are missing."""

import sys

from slimkv.bench.commands import main

if __name__ == "__main__":
    sys.exit(main())
