"""How agreement is shown."""
