"""The commands, a file or a folder each; `cli/main.py` lists them."""
