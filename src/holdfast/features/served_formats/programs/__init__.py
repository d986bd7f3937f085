"""Programs that read an export by themselves, each run by an interpreter of its own; none imports Holdfast."""
