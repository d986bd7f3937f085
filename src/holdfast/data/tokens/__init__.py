"""Tokenisation of rows: chat templates, loss masks, preference pairs, images."""
