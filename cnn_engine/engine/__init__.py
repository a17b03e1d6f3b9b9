"""How it is computed: the engine, its variants, and the plan of a pass."""
