"""Keep all that has been imported out of garbage collection: import this last, before forks.

A collection writes into the header of each object that it looks at. In a forked process every
page that it writes to must be copied first, and a preloaded heap has tens of thousands of pages.
"""

import gc

gc.collect()
gc.freeze()
