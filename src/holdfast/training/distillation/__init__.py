"""A student that learns from the distributions of a teacher."""
