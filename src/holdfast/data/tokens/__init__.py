"""From rows to tokens and masks."""
