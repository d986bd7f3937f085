"""One root of the configuration a verb, and the rules that join its sections."""
