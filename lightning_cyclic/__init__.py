"""Delay-tolerant and memory-lean parallel training of unmodified LightningModules."""
