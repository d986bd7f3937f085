"""Starting the ranks of a run on this machine, and saying what happened when one dies."""
