"""Workers that hold the whole model, or share it: step times, links, convergence."""
