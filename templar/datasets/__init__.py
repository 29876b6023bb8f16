"""Building and checking datasets of either layout."""
