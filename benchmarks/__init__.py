"""What the package's figures come from: `python -m benchmarks` prints what there is.

    __main__.py     the one entry, and the index
    rounds.py       what all share: workers in processes of their own, figures over rounds
    data_parallel/  replicated and sharded workers, the links between them, convergence
    pipeline/       stages: whole pipelines, and the Python around one stage
    gpu/            all that one GPU can show, in one session
    memory/         what a step of a pruned network keeps

`upstream_plugin.py` is a plugin of pytest, not a benchmark.
"""
