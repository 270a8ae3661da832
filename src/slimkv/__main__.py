"""``python -m slimkv``: the same as the ``slimkv`` command."""

from slimkv.cli import main

main()
