"""Tools of servers that speak the Model Context Protocol: listed before a run, called in episodes."""
