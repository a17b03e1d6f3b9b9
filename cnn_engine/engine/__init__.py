"""The engine that users see: its plans are cached, chosen and run here."""
