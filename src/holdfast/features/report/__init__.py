"""Shows people what happened in a run, as a page, a live view or a comparison. Apart from the page,
it writes nothing.
"""
