"""The files of a model: finding its directory, its configuration, conversion of weights, processors, 4-bit storage."""
