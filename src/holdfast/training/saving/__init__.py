"""What a checkpoint of a run holds, when it is written, and how a run continues from it."""
