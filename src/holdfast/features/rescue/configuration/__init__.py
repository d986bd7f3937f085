"""Converts configurations of other systems to Holdfast's, by a closed set of rules."""
