"""The engine that users see, and how its plans are cached, chosen and run."""
