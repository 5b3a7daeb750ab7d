"""All that one GPU can show, in one session of a few minutes.

session.py       the parts in their order, and the time that each has
ranks.py         processes on the GPU, what they say, and how they end
fits.py          GPT-2, trained by Lightning, timed and weighed
shared.py        share, nccl: may ranks share the GPU, what a communicator costs; bits
steps.py         one, data_parallel: ways to train, in turn
pipelines.py     pipelines: our schedules beside torch's
account.py       memory: pruned states; the peak beside the package's account
traces.py        trace: where the time goes
"""
