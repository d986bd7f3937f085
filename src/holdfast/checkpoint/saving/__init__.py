"""Write a checkpoint: agreement between ranks, files, the commit, and the rehearsal before step 1."""
