"""What fits: sizes of pools that do not exist yet, and what a plan chooses where the launch leaves it."""
