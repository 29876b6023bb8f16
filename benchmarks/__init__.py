"""Every figure in the README comes from a command in here."""
