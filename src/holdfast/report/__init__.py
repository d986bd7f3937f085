"""Pages and plots of finished runs."""
