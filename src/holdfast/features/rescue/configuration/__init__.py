"""From a file of another system to one of ours: the closed set of conversions, their application, and the text."""
