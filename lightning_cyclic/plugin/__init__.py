"""What is between Lightning and the runtime: hooks, checks, checkpoints, logging."""

from lightning_cyclic.compat import check_modules
from lightning_cyclic.plugin.hosts import check_hosts

check_hosts()  # before modules here import what an older host lacks
check_modules()
