"""Codecs: what workers send of a gradient, where all of it is too much for the network."""
