"""What happened in a run, for people: a page, a live view, a comparison. Reads run directories and writes none."""
