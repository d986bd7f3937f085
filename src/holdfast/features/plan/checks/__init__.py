"""The checks of `holdfast doctor`, and the findings that they return."""
