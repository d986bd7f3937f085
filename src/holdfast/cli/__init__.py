"""The command line. Nothing heavy is imported before a verb needs it."""
