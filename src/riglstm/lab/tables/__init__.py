"""From one command to the paper's tables: what is run, how a run is recorded, what is printed."""
