"""The conformance matrix: modules and Trainer configurations, under every kind of preset."""
