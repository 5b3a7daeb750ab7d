"""Models in stages: pipelines beside others, and the cost of running one stage."""
