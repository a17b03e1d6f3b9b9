"""A forward pass, made ready: its steps, its memory, its order on the device."""
