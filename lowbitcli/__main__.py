"""`python -m lowbitcli` is `lowbit`."""

from lowbitcli.cli import main

main()
