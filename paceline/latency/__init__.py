"""How long a step takes: a model fitted to a profile, and the floor below which no step can be."""
