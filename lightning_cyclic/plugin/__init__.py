"""What is between Lightning and the runtime: hooks, checks, checkpoints, logging."""

from lightning_cyclic.compat import check_modules, check_versions

check_versions()  # before modules here import what an older host lacks
check_modules()
