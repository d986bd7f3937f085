"""The check before step 1: a model's numbers beside those that its files promise."""
