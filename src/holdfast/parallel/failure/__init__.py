"""How ranks learn of each other's failures."""
