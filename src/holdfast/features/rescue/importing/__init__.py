"""Another system's checkpoint as one of a run of ours."""
