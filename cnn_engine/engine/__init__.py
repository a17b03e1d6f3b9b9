"""The engine that users see, and how its plans are kept, chosen and run."""
