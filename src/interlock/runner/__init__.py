"""One step of one rank."""
