"""Codecs: what workers send of a gradient or an activation, where all is too much."""
